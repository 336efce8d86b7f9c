"""Instant checks of exercises: each prints one line, `right: ...` or `not yet: ...`, and never the answer.

A check returns whether it passed and raises nothing, so that a chapter still runs to its end while an exercise is open.
An answer that is still `...` or None, or a list of these, counts as open.
"""

import numpy as np


def _say(name: str, complaint: str | None) -> bool:
    print(f"right: {name}" if complaint is None else f"not yet: {name} {complaint}")
    return complaint is None


def _open(value) -> bool:
    """Is nothing filled in yet? A list of open answers, as a function with the body `return ...` gives, is open too."""
    return value is ... or value is None or (isinstance(value, (list, tuple)) and len(value) > 0 and all(_open(item) for item in value))


def _array(value) -> np.ndarray:
    if hasattr(value, "detach"):  # a torch tensor, perhaps with a gradient or on a GPU
        value = value.detach().cpu()
    return np.asarray(value)


def close(name: str, value, expected, tolerance: float = 1e-6) -> bool:
    """Is every number of `value` within `tolerance` of `expected`? Scalars, lists, arrays or tensors of one shape."""
    if _open(value):
        return _say(name, "is still to be filled in")
    try:
        numbers = _array(value).astype(float)
    except (TypeError, ValueError):
        return _say(name, f"must be a number or an array of numbers, got {type(value).__name__}")
    target = _array(expected).astype(float)
    if numbers.shape != target.shape:
        return _say(name, f"has shape {numbers.shape}, expected {target.shape}")
    wrong = ~(np.abs(numbers - target) <= tolerance)  # written so that nan is wrong
    if not wrong.any():
        return _say(name, None)
    if numbers.ndim:
        return _say(name, f"differs in {wrong.sum()} of {wrong.size} entries")
    return _say(name, "is not a number" if np.isnan(numbers) else "is too large" if numbers > target else "is too small")


def equal(name: str, value, expected) -> bool:
    """Is `value` exactly `expected`? For words, integers, lists, integer arrays."""
    if _open(value):
        return _say(name, "is still to be filled in")
    try:
        same = np.array_equal(_array(value), _array(expected))
    except ValueError:  # lists of unequal length inside
        same = value == expected
    return _say(name, None if same else "is something else")


def holds(name: str, condition, hint: str = "does not hold yet") -> bool:
    """Is `condition` true? `hint` says what to look at when it is not."""
    if _open(condition):
        return _say(name, "is still to be filled in")
    return _say(name, None if np.all(_array(condition)) else hint)


def largest(name: str, value, function, candidates, tolerance: float = 1e-6) -> bool:
    """Is `value` as large as `function` at the best of `candidates`, up to `tolerance`? The target is found here and shown nowhere."""
    if _open(value):
        return _say(name, "is still to be filled in")
    best = max(float(_array(function(candidate))) for candidate in candidates)
    return _say(name, None if float(_array(value)) >= best - tolerance else "can be larger")  # written so that nan is wrong
