"""Index, Retrieval and their gaps: heads with weights set by hand, and exactly how far their right key stands above the next.

P1, sections 3.4 and 3.5 and appendix F; P0, theorems 2 to 7. The chapter `theory` states and proves what is used here.

Words. `angles` [plane]: radians a position of each rotary plane. `weights` [plane]: size of the query-key product in each plane, as given,
never normalised; they sum to 1 for gaps "at unit total weight". `sharpness` multiplies the logits before the softmax. A distance is query
position minus key position, so the query's own key has distance 0. Functions of the length return an array indexed by the number of tokens.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import linprog
from torch import Tensor, nn

from rope_heads.model import Attention

# ---- the functions ---------------------------------------------------------------------------------------------------------------


def index(tokens: Int[np.ndarray, "prompt position"], integers: int) -> Int[np.ndarray, "prompt position"]:
    """Index: an integer i (ids 1 to `integers`) becomes the token i places back if that is a letter (higher ids); all else stays.

    A pointer that leaves the sequence stays too; the constructions below promise nothing for it.
    """
    tokens = np.asarray(tokens)
    target = np.arange(tokens.shape[1]) - tokens
    fetched = np.take_along_axis(tokens, np.maximum(target, 0), axis=1)
    return np.where((tokens <= integers) & (target >= 0) & (fetched > integers), fetched, tokens)


def letters_in(tokens: Int[np.ndarray, "..."], letters: int, digits: int) -> tuple[np.ndarray, np.ndarray]:
    """First and second letter of each pair, 0 to letters - 1; second is -1 for letter+digit (ids 1 to letters x digits)."""
    pair = np.asarray(tokens) - 1
    pure = pair - letters * digits  # letter+letter counted from 0
    return np.where(pure < 0, pair // digits, pure // letters), np.where(pure < 0, -1, pure % letters)


def retrieval(tokens, letters: int, digits: int, last: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Retrieval: a letter+letter pair becomes the earlier pair that starts with its second letter; letter+digit stays.

    Returns the result [prompt, position] and where it is defined. Letter+letter: an earlier match exists, all matches are one token, and
    the pair does not name its own first letter. Letter+digit: no other token before it starts with its letter. `last`: of several
    different matches the last counts (P0's partial induction), so that they may differ.
    """
    tokens = np.asarray(tokens)
    first, second = letters_in(tokens, letters, digits)
    fixed = second < 0
    wanted, result, defined = np.where(fixed, first, second), tokens.copy(), fixed.copy()
    for j in range(1, tokens.shape[1]):
        match = first[:, :j] == wanted[:, j, None]  # [prompt, earlier]
        found = j - 1 - match[:, ::-1].argmax(axis=1) if last else match.argmax(axis=1)
        fetched = np.where(fixed[:, j], tokens[:, j], np.take_along_axis(tokens, found[:, None], axis=1)[:, 0])
        pointing = match.any(axis=1) & ~fixed[:, j]
        result[pointing, j] = fetched[pointing]
        one = last | (~match | (tokens[:, :j] == fetched[:, None])).all(axis=1)
        defined[:, j] = one & (fixed[:, j] | pointing & (first[:, j] != second[:, j]))
    return result, defined


# ---- exact gaps ------------------------------------------------------------------------------------------------------------------


def kernel(angles, weights, length: int, phases=0.0) -> Float[np.ndarray, "distance"]:
    """sum_k weights_k cos(phases_k + d angles_k) for d = 0 .. length - 1, in fp64.

    d = a b + c turns the sum into one matrix product over a and c: a million distances take a hundredth of the cosines.
    """
    angles, weights = (np.atleast_1d(np.asarray(v, float)) for v in (angles, weights))
    if angles.shape != weights.shape or angles.ndim != 1:
        raise ValueError(f"weights must have one entry per angle, got shapes {weights.shape} and {angles.shape}")
    if not (np.isfinite(angles).all() and np.isfinite(weights).all() and np.isfinite(phases).all()):
        raise ValueError(f"angles, weights and phases must be finite, got {angles.tolist()}, {weights.tolist()} and {phases}")
    if length < 1:
        raise ValueError(f"length must be >= 1, got {length}")
    step = int(np.ceil(np.sqrt(length)))
    coarse = weights * np.exp(1j * (np.outer(np.arange(-(-length // step)) * step, angles) + phases))  # [a, plane]
    fine = np.exp(1j * np.outer(np.arange(step), angles))  # [c, plane]
    return (coarse.real @ fine.real.T - coarse.imag @ fine.imag.T).ravel()[:length]


def index_gap(angles, weights, length: int, over: str = "min") -> Float[np.ndarray, "tokens"]:
    """Gap of the Index head by number of tokens, 0 .. length: right key's logit minus the largest other, smallest (or largest) over inputs.

    A target s places back has competitors at offsets -s .. n - 1 - s without 0, and the kernel is even, so only the furthest offset counts:
    n - 1 in the worst input, n // 2 in the best. Up to one token there is no competitor and the gap is inf. `over="max"` is Definition 3.1
    of P1 as printed, `"min"` what its Lemma F.1 needs.
    """
    value = kernel(angles, weights, length)
    highest = np.maximum.accumulate(np.r_[-np.inf, value[1:]])  # [offset], the best competitor up to each offset
    n = np.arange(length + 1)
    furthest = {"min": np.maximum(n - 1, 0), "max": n // 2}
    if over not in furthest:
        raise ValueError(f"over must be one of {tuple(furthest)}, got {over!r}")
    return value[0] - highest[furthest[over]]


def _two_best(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Running maximum, where it stands, and running second largest of `values` [n]."""
    best = np.maximum.accumulate(values)
    rises = np.r_[True, values[1:] > best[:-1]]
    where = np.maximum.accumulate(np.where(rises, np.arange(len(values)), 0))
    return best, where, np.maximum.accumulate(np.r_[-np.inf, np.minimum(values[1:], best[:-1])])


def _turns(turns, letters: int, planes: int) -> np.ndarray:
    if letters < 2:
        raise ValueError(f"letters must be >= 2, got {letters}: with one letter there is nothing to tell apart")
    turns = np.full(planes, 2 * np.pi / letters) if turns is None else np.atleast_1d(np.asarray(turns, float))
    steps = turns * letters / (2 * np.pi)
    if turns.shape != (planes,) or not np.abs(steps - steps.round()).max() <= 1e-9:
        raise ValueError(f"turns must be one multiple of 2 pi / letters for each of {planes} planes, got {turns.tolist()}")
    return turns


def retrieval_logits(angles, weights, length: int, letters: int, turns=None, centre: float = 0.0) -> Float[np.ndarray, "letter distance"]:
    """Logit of a key by how many letters it is off (row 0: the right one) and by distance: sum_k w_k cos(m turns_k + (d - centre) g_k).

    `turns` [plane]: phase between neighbouring letters, default 2 pi / letters in every plane. `centre`: distance at which the query looks.
    """
    angles = np.atleast_1d(np.asarray(angles, float))
    turns = _turns(turns, letters, len(angles))
    return np.stack([kernel(angles, weights, length, m * turns - centre * angles) for m in range(letters)])


def retrieval_gap(angles, weights, length: int, letters: int, turns=None, centre: float = 0.0,
                  over: str = "min") -> Float[np.ndarray, "tokens"]:  # fmt: skip
    """Gap of the Retrieval head by number of tokens, 0 .. length: right key's logit minus the largest other, extreme over inputs.

    Inputs are those in which the right word stands once (copies of it can only help): at distance t, 0 for a letter+digit query, with
    wrong letters everywhere else. The worst input has the best wrong letter at the best other distance; in the best input every wrong
    letter is as bad as it can be. inf up to one token.
    """
    logits = retrieval_logits(angles, weights, length, letters, turns, centre)
    if over == "min":
        right, at_right, right_next = _two_best(-logits[0])
        wrong, at_wrong, wrong_next = _two_best(logits[1:].max(axis=0))
        clash = np.minimum(-right_next - wrong, -right - wrong_next)  # two keys cannot stand in one place
        gap = np.where(at_right == at_wrong, clash, -right - wrong)
    elif over == "max":
        right, at_right, right_next = _two_best(logits[0])
        wrong, at_wrong, wrong_next = _two_best(logits[1:].min(axis=0))
        elsewhere = np.where(at_right == at_wrong, right_next, right)  # the best right key that leaves the best wrong place occupied
        gap = np.maximum(elsewhere - wrong, logits[0, at_wrong] - wrong_next)
    else:
        raise ValueError(f"over must be one of ('min', 'max'), got {over!r}")
    return np.r_[np.inf, np.inf, gap[1:]]


def best_weights(angles, length: int, tolerance: float = 1e-9) -> tuple[Float[np.ndarray, "plane"], float]:
    """Weights >= 0 of sum 1 with the largest Index gap at `length` tokens, and that gap.

    A linear programme over offsets 1 .. length - 1, solved with few of them, then with those that are violated added. The gap returned is
    the exact one of the weights returned; the programme's own value, an upper bound, is at most `tolerance` higher.
    """
    angles = np.atleast_1d(np.asarray(angles, float))
    planes, offsets = len(angles), np.arange(1, min(length, 200))
    while True:
        rows = np.c_[np.cos(np.outer(offsets, angles)) - 1, np.ones(len(offsets))]  # gap <= sum_k w_k (1 - cos)
        found = linprog(np.r_[np.zeros(planes), -1.0], A_ub=rows, b_ub=np.zeros(len(offsets)), A_eq=[np.r_[np.ones(planes), 0.0]],
                        b_eq=[1.0], bounds=[(0, None)] * planes + [(None, None)], method="highs")  # fmt: skip
        weights = np.maximum(found.x[:planes], 0)
        weights /= weights.sum()
        value = kernel(angles, weights, length)
        gap = float(value[0] - value[1:].max())
        if gap >= found.x[-1] - tolerance:
            return weights, gap
        offsets = np.union1d(offsets, 1 + np.argsort(value[1:])[-30:])


# ---- softmax: from gap to length -------------------------------------------------------------------------------------------------


def sharpness_needed(gap, tokens) -> np.ndarray:
    """ln(n - 1) / gap, inf where the gap is not positive: any larger sharpness puts more than half of the attention on the right key."""
    gap, tokens = np.asarray(gap, float), np.asarray(tokens, float)
    return np.where(gap > 0, np.log(np.maximum(tokens - 1, 1)) / np.where(gap > 0, gap, 1), np.inf)


def _sharp(sharpness: float) -> float:
    if not sharpness >= 0:
        raise ValueError(f"sharpness must be >= 0, got {sharpness}")
    return sharpness


def promised_length(gap: Float[np.ndarray, "tokens"], sharpness: float) -> int:
    """Longest input up to which sharpness x gap > ln(n - 1) at every length: there all answers are right. `gap` as from `index_gap`."""
    n = np.arange(2, len(gap))
    broken = np.flatnonzero(~(_sharp(sharpness) * gap[2:] > np.log(n - 1)))
    return int(broken[0]) + 1 if len(broken) else len(gap) - 1


def index_breaks(angles, weights, sharpness: float, length: int) -> tuple[int, int] | None:
    """Shortest input (tokens, pointer) that the one-layer Index head answers wrongly, or None up to `length` tokens.

    A pointer s gets its letter iff the softmax weight there exceeds 1/2, that is W(s) + W(n - 1 - s) < 1. Here W(m) is the sum of
    e^(-sharpness (C(0) - C(t))) over t = 1 .. m, and C is the kernel.
    """
    value = kernel(angles, weights, length)
    against = np.cumsum(np.r_[0.0, np.exp(_sharp(sharpness) * (value[1:] - value[0]))])  # W
    s = np.arange(1, length)
    for n in range(2, length + 1):  # a single pass, stopped at the first failure
        total = against[s[: n - 1]] + against[n - 1 - s[: n - 1]]
        if total.max() >= 1:
            return n, int(s[total.argmax()])
    return None


def retrieval_breaks(angles, weights, sharpness: float, length: int, letters: int, turns=None,
                     centre: float = 0.0) -> tuple[int, int, int] | None:  # fmt: skip
    """Shortest input (tokens, distance of the right key, letters the others are off) that the Retrieval head answers wrongly, or None.

    In the worst input all other words are one token, m letters off: it wins iff sum_{u != t} e^(sharpness G_m(u)) >= e^(sharpness G_0(t)).
    """
    logits = retrieval_logits(angles, weights, length, letters, turns, centre)
    if not _sharp(sharpness) * np.abs(logits).max() <= 1_000:
        raise ValueError(f"sharpness times the largest logit must be <= 1000, got {sharpness * np.abs(logits).max():g}: fp64 cannot tell beyond")
    power = np.exp(sharpness * (logits - logits.max()))
    found = []
    for m in range(1, letters):
        cost, at, _ = _two_best(-(power[0] + power[m]))
        wrong = np.flatnonzero((np.cumsum(power[m]) >= -cost)[1:])
        if len(wrong):
            found.append((int(wrong[0]) + 2, int(at[wrong[0] + 1]), m))
    return min(found) if found else None


# ---- heads that cannot -----------------------------------------------------------------------------------------------------------


def copying_margin(sequences: Int[np.ndarray, "prompt position"], answers: Int[np.ndarray, "prompt"]) -> float:
    """How well one fixed attention pattern can serve all sequences: the largest margin, over patterns w >= 0 of sum 1, by which the answer
    holds more attention than any other token in every sequence. Not positive: no purely positional head that copies answers all of them.
    """
    rows = []
    for row, answer in zip(np.asarray(sequences), answers):
        right = row == answer
        rows += [np.r_[(row == other).astype(float) - right, 1.0] for other in np.unique(row[~right])]
    n = np.asarray(sequences).shape[1]
    found = linprog(np.r_[np.zeros(n), -1.0], A_ub=np.array(rows), b_ub=np.zeros(len(rows)), A_eq=[np.r_[np.ones(n), 0.0]], b_eq=[1.0],
                    bounds=[(0, None)] * n + [(-1, 1)], method="highs")  # fmt: skip
    return float(found.x[-1])


# ---- constructions ---------------------------------------------------------------------------------------------------------------


class HandBuilt(nn.Module):
    """Attention layers with weights set by hand: no MLP, no norm. Token ids [prompt, position] to logits [prompt, query, id].

    A layer returns x + a where its `residual` is true, else a, with a the output of its one head.
    """

    def __init__(self, embedding: Float[Tensor, "id width"], unembedding: Float[Tensor, "id width"], layers, residual):
        super().__init__()
        self.register_buffer("embedding", embedding)
        self.register_buffer("unembedding", unembedding)
        self.layers, self.residual = nn.ModuleList(layers), tuple(residual)
        self.requires_grad_(False).eval()

    def embed(self, tokens) -> Float[Tensor, "prompt position width"]:
        return self.embedding[torch.as_tensor(tokens)]

    def forward(self, tokens, last: bool = False) -> Float[Tensor, "prompt query id"]:
        """With `last`, logits of the last position alone; the last layer then computes one row."""
        x = self.embed(tokens)
        for number, (layer, keep) in enumerate(zip(self.layers, self.residual), 1):
            a = layer(x, 1 if last and number == len(self.layers) else None)
            x = x[:, -a.shape[1] :] + a if keep else a
        return x @ self.unembedding.T

    def answer(self, tokens, last: bool = True) -> np.ndarray:
        """Token with the largest logit, [prompt] at the last position or [prompt, position]. A few prompts at a time, about 100 MB each."""
        tokens = torch.as_tensor(np.asarray(tokens))
        batch = max(1, 2_000_000 // (tokens.shape[1] * self.embedding.shape[1]))
        chosen = torch.cat([self(part, last).argmax(-1) for part in tokens.split(batch)]).numpy()
        return chosen[:, 0] if last else chosen


def _head(width: int, angles, sharpness: float, queries, keys, values) -> Attention:
    """One head: `queries`, `keys` complex [plane, width] with the phase of each coordinate in each plane, `values` [d_value, width]."""
    planes = len(angles)
    d_head = max(2 * planes, len(values) + len(values) % 2)  # dimensions beyond the rotary planes carry values only
    turned = torch.as_tensor(np.asarray(angles, float))
    head = Attention(width, 1, d_head, angles=turned, scale=float(sharpness)).double().requires_grad_(False)
    head.qkv.weight.zero_()
    head.out.weight.zero_()
    for target, source in ((head.w_q, queries), (head.w_k, keys)):
        target[0, 0 : 2 * planes : 2] = torch.from_numpy(source.real)
        target[0, 1 : 2 * planes : 2] = torch.from_numpy(source.imag)
    head.w_v[0, : len(values)] = torch.from_numpy(values)
    return head


def _checked(angles, weights) -> tuple[np.ndarray, np.ndarray]:
    angles = np.atleast_1d(np.asarray(angles, float))
    weights = np.full(len(angles), 1 / len(angles)) if weights is None else np.atleast_1d(np.asarray(weights, float))
    if weights.shape != angles.shape or (weights < 0).any():
        raise ValueError(f"weights must be >= 0, one per angle, got {weights.tolist()} for {len(angles)} angles")
    return angles, weights


def _stack(one_hot: Tensor, width: int, head: Attention, residual: bool, layers: int, reflexive: int) -> HandBuilt:
    """`layers` copies of the head, then `reflexive` layers that add nothing to what is there."""
    embedding = torch.cat([one_hot, torch.ones(len(one_hot), width - one_hot.shape[1], dtype=one_hot.dtype)], dim=1)  # the constant, if any
    idle = _head(width, head.angles.numpy(), 1.0, *(np.zeros((len(head.angles), width), complex),) * 2, np.zeros((1, width)))
    unembedding = torch.nn.functional.pad(one_hot, (0, width - one_hot.shape[1]))
    return HandBuilt(embedding, unembedding, [head] * layers + [idle] * reflexive, [residual] * layers + [True] * reflexive)


def build_index(letters: int, integers: int, angles, weights=None, *, sharpness: float, layers: int = 1, reflexive: int = 0,
                pull: float | None = None) -> HandBuilt:  # fmt: skip
    """Index as one head (P1, Theorem 3.1, with any number of planes), `layers` times, then `reflexive` identity layers.

    ids: 0 unused, 1 to `integers` pointers, then letters, as in the Number task. Width: one-hot plus a constant. All keys are the same
    vector v, a letter's query is `pull` x v, that of integer i is v turned back by i places. Values hold twice the letter, nothing for
    integers; residual x + a. In a stack the residual stream keeps the integer beside the letter it fetched, and the letter has to outweigh
    it in the next query: `pull` is 1 for one layer (as printed) and 100 for more.
    """
    angles, weights = _checked(angles, weights)
    size, first = 1 + integers + letters, 1 + integers
    size_v = np.sqrt(weights)[:, None]  # |v| in each plane
    queries, keys = np.zeros((2, len(angles), size + 1), complex)
    keys[:, size:] = size_v
    queries[:, 1:first] = size_v * np.exp(-1j * np.outer(angles, np.arange(1, first)))
    queries[:, first:size] = size_v * ((1.0 if layers == 1 else 100.0) if pull is None else pull)
    values = np.zeros((letters, size + 1))
    values[np.arange(letters), first + np.arange(letters)] = 2.0
    head = _head(size + 1, angles, sharpness, queries, keys, values)
    head.out.weight[first:size, :letters] = torch.eye(letters, dtype=torch.float64)
    return _stack(torch.eye(size, dtype=torch.float64), size + 1, head, True, layers, reflexive)


def build_retrieval(letters: int, digits: int, angles, weights=None, *, sharpness: float, layers: int = 1, reflexive: int = 0, turns=None,
                    centre: float = 0.0) -> HandBuilt:  # fmt: skip
    """Retrieval as one head (P1, Theorem 3.1, with any number of planes), `layers` times, then `reflexive` identity layers.

    ids: 0 unused, then letter+digit and letter+letter pairs as in the Letter task. Keys have the phase of the first letter, queries that
    of the second (of the first, for letter+digit); values are the tokens and replace what was there. `turns`, `centre`: `retrieval_logits`.
    """
    angles, weights = _checked(angles, weights)
    turns = _turns(turns, letters, len(angles))
    size = 1 + letters * (digits + letters)
    first, second = letters_in(np.arange(1, size), letters, digits)
    wanted = np.where(second < 0, first, second)
    queries, keys = np.zeros((2, len(angles), size), complex)
    keys[:, 1:] = np.sqrt(weights)[:, None] * np.exp(-1j * np.outer(turns, first))
    queries[:, 1:] = np.sqrt(weights)[:, None] * np.exp(-1j * (np.outer(turns, wanted) + (centre * angles)[:, None]))
    head = _head(size, angles, sharpness, queries, keys, np.eye(size))
    head.out.weight[:, :size] = torch.eye(size, dtype=torch.float64)
    return _stack(torch.eye(size, dtype=torch.float64), size, head, False, layers, reflexive)
