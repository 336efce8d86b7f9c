"""Asking language models of any provider through inspect-ai (extra llm). The model that runs here is in `small_routes`.

Every answer is on the disk before the next call is planned, so that an interrupted run goes on without paying twice. What a call may cost is
set aside before it is made, attempts that fail count as paid, and calls that would pass the limit are not made.
"""

import asyncio
import contextlib
import datetime
import hashlib
import importlib.util
import json
import os
import random
import re
import sys
import tempfile
import urllib.parse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rope_heads import language_models, one_hop
from rope_heads.language_models import Price
from rope_heads.one_hop import Item

SMALL = language_models.SMALL  # in this process; the other two routes to the same weights:
SMALL_HTTP, SMALL_HF = "smollm2-http", "smollm2-hf"  # a server on loopback; inspect's local Hugging Face provider


def need(*modules: str) -> None:
    """ImportError with the line that installs the extra when a module is missing."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"{', '.join(missing)} not found: {language_models.INSTALL}")


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def missing_items(items: Sequence[Item], path: Path, model: str) -> list[Item]:
    """Items without an answer of `model` in the file, by prompt hash: a changed prompt is a new question."""
    have = {r["prompt"] for r in language_models.read(path) if r["model"] == model}
    wanted = {language_models.prompt_hash(item): item for item in items}  # each once, also when it was named twice
    return [item for digest, item in wanted.items() if digest not in have]


@contextlib.contextmanager
def alone(path: Path):
    """One process for a file: two would ask, and pay for, the same items. The lock lies in the folder for temporary files and ends with the process."""
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    with open(Path(tempfile.gettempdir()) / f"rope-heads-{name}.lock", "w") as lock:
        with contextlib.suppress(ImportError):  # Windows
            import fcntl

            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another process is writing {path}: wait for it or stop it") from None
        yield


HOPELESS = {400, 401, 403, 404, 405, 413, 422}  # the same request would fail again
NOT_ASKED = "not asked"  # how reasons begin when no call was made
OWN_RETRIES = ("openai", "openai-api", "anthropic")  # their clients retry silently unless told not to; attempts are counted here


@dataclass(frozen=True)
class Manner:
    """How calls are made. Seconds, attempts, US dollars."""

    timeout: float = 60.0
    retries: int = 4
    first_wait: float = 2.0  # doubled at each retry, with a random share on top
    concurrency: int = 8
    max_tokens: int = 16  # of an answer; the least that OpenAI's API accepts
    stop_after: int = 20  # failures in a row: then something is wrong with the server or the key
    price: Price | None = None
    max_cost: float | None = None
    max_calls: int | None = None


@dataclass
class Outcome:
    """What a run brought: answers, items without one by reason, an example of each reason, tokens and dollars (set aside or spent)."""

    answered: int = 0
    missing: Counter = field(default_factory=Counter)
    example: dict[str, str] = field(default_factory=dict)
    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0  # spent, and set aside for attempts that failed
    under_way: int = 0  # calls that have not come back; the most that one can cost is set aside for each
    in_a_row: int = 0
    unwritable: bool = False  # an answer could not be kept: no other is paid for

    def fail(self, reason: str, told: str = "") -> None:
        self.missing[reason] += 1
        self.example.setdefault(reason, told)

    def take(self, found: dict, price: Price | None) -> None:
        self.in_a_row = 0
        self.answered += 1
        self.input_tokens += found["input_tokens"]
        self.output_tokens += found["output_tokens"]
        self.cost += price.of(found["input_tokens"], found["output_tokens"]) if price else 0.0


def redacted(text: str) -> str:
    """`text` without the values of environment variables that hold secrets: a server may send a key back."""
    held = [v.strip() for k, v in os.environ.items() if any(word in k.upper() for word in ("KEY", "TOKEN", "SECRET", "PASSWORD"))]
    secrets = {form for v in held if len(v) >= 8 for form in (v, ascii(v)[1:-1], json.dumps(v)[1:-1], urllib.parse.quote(v, safe=""))}
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, "[redacted]")
    return text


def forecast(items: Sequence[Item], manner: Manner) -> str:
    """One line: calls, tokens and dollars at most, if no attempt fails. `max_calls` is heeded; `max_cost` is named."""
    asked = items[: manner.max_calls]
    tokens, written = sum(map(language_models.tokens_at_most, asked)), len(asked) * manner.max_tokens
    line = f"{len(asked)} calls to make" + (f" of {len(items)}, the limit of calls" if len(asked) < len(items) else "")
    line += f", at most about {tokens:,} input and {written:,} output tokens"
    line += f", at most about {manner.price.of(tokens, written):.2f} US dollars" if manner.price else ""
    return line + (f" and never more than {manner.max_cost:.2f}" if manner.max_cost is not None else "")


def cause(error: BaseException) -> BaseException:
    """The error itself, out of the wrapper of inspect's retry library."""
    last = getattr(error, "last_attempt", None)
    return error if last is None else last.exception() or error


def told(error: BaseException) -> str:
    """What a provider said, on one line and without secrets. inspect puts the whole request in front of it, and marks for colours around it."""
    text = getattr(error, "provider_message", None) or str(error)
    return language_models.plain(re.sub(r"\[/?(bold|blue)\]", "", " ".join(redacted(text).split())), 300)


def why(error: BaseException) -> tuple[str, bool]:
    """(reason in a few words, is another attempt worth while)."""
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        return f"HTTP {status}", status not in HOPELESS
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return "no answer in time", True
    if "Connect" in type(error).__name__ or "Protocol" in type(error).__name__:
        return "connection failed or closed", True
    return f"unreadable answer ({type(error).__name__})", True


def settings_for(model: str, manner: Manner):
    """inspect's GenerateConfig: no retries of its own, one short answer, no reasoning where that must be said."""
    from inspect_ai.model import GenerateConfig

    quiet = {"reasoning_effort": "none", "reasoning_summary": "none"} if model.startswith("openai/gpt-5") else {}  # a summary costs a call
    return GenerateConfig(max_retries=0, max_tokens=manner.max_tokens, max_connections=manner.concurrency, **quiet)


def chat_messages(item: Item) -> list:
    from inspect_ai.model import ChatMessageAssistant, ChatMessageUser

    kinds = {"user": ChatMessageUser, "assistant": ChatMessageAssistant}
    return [kinds[turn["role"]](content=turn["content"]) for turn in one_hop.prompt(item)]


async def attempt(model, item: Item, name: str, manner: Manner) -> dict:
    """The record of one call, or an exception. A reply without any choice is no answer; an empty text is one, and wrong."""
    async with asyncio.timeout(manner.timeout):
        output = await model.generate(chat_messages(item), config=settings_for(name, manner))
    if output.error:
        raise ValueError(output.error)
    if not output.choices:
        raise ValueError("the reply holds no choice")
    usage = output.usage
    tokens = (usage.input_tokens, usage.output_tokens) if usage else (-1, -1)
    if min(tokens) < 0:  # none told, or nonsense that would make room below the cost limit
        tokens = language_models.tokens_at_most(item), manner.max_tokens
    return language_models.record(item, name, today(), redacted(output.completion), *tokens)


async def _may_call(outcome: Outcome, manner: Manner, reserve: float) -> str:
    """Empty when a call may be made, else the reason. Waits while calls under way hold money that they may not need."""
    if outcome.unwritable:
        return f"{NOT_ASKED}: answers cannot be kept"
    if outcome.in_a_row >= manner.stop_after:
        return f"{NOT_ASKED}: {manner.stop_after} failures in a row"
    while manner.max_cost is not None and outcome.cost + (outcome.under_way + 1) * reserve > manner.max_cost:
        if not outcome.under_way:
            return f"{NOT_ASKED}: the cost limit is reached"
        await asyncio.sleep(0.05)
    return f"{NOT_ASKED}: the limit of calls is reached" if manner.max_calls is not None and outcome.calls >= manner.max_calls else ""


async def _answer(model, item: Item, name: str, path: Path, manner: Manner, outcome: Outcome, reserve: float) -> None:
    """Attempts until there is an answer, no hope or no leave; what came of it is in `outcome`."""
    for number in range(manner.retries + 1):
        refused = await _may_call(outcome, manner, reserve)
        if refused:
            return outcome.fail(refused)
        outcome.calls += 1
        outcome.under_way += 1  # no await since the limits were looked at: calls side by side stay below them together
        try:
            found = await attempt(model, item, name, manner)
        except Exception as wrapped:  # whatever a provider's client raises: the run goes on with the next item
            outcome.cost += reserve
            error = cause(wrapped)
            reason, again = why(error)
        else:
            try:
                language_models.append(path, [found])
            except OSError as error:
                outcome.unwritable, outcome.cost = True, outcome.cost + reserve
                return outcome.fail("answered, but the answer could not be kept", f"{path}: {error.strerror or error}")
            outcome.take(found, manner.price)
            return None
        finally:
            outcome.under_way -= 1
        if not again or number == manner.retries:
            outcome.in_a_row += 1
            return outcome.fail(reason, told(error))
        await asyncio.sleep(manner.first_wait * 2**number * (1 + random.random() / 2))
    return None


def connected(spec: str, model_args: dict):
    """inspect's model, before anything is agreed or paid: a missing key, provider or client ends here, each told in the provider's own way."""
    from inspect_ai.model import get_model

    args = {"max_retries": 0, **model_args} if spec.split("/")[0] in OWN_RETRIES else model_args
    try:
        return get_model(spec, memoize=False, **args)
    except Exception as error:
        raise ValueError(f"{spec} cannot be asked: {told(error)}") from None


async def _ask_all(items, path, name, manner, report, connection) -> Outcome:
    outcome, waiting = Outcome(), iter(items)
    most = max(map(language_models.tokens_at_most, items)), manner.max_tokens
    reserve = manner.price.of(*most) if manner.price else 0.0
    aim, reported = len(items[: manner.max_calls]), 0

    async def worker(model):
        nonlocal reported
        for item in waiting:
            await _answer(model, item, name, path, manner, outcome, reserve)
            done = outcome.answered + sum(n for reason, n in outcome.missing.items() if not reason.startswith(NOT_ASKED))
            if done > reported and done % max(1, aim // 20) == 0:
                reported = done
                report(f"{done}/{aim} items, {outcome.answered} answered")

    async with connection as model:
        await asyncio.gather(*(worker(model) for _ in range(min(manner.concurrency, len(items)))))
    return outcome


def ask(items: Sequence[Item], path: Path, name: str, manner: Manner, report: Callable[[str], None], spec: str | None = None,
        confirm: Callable[[], bool] = lambda: True, **model_args) -> Outcome:  # fmt: skip
    """Asks a model of any provider of inspect for the items that lack an answer. `spec`: inspect's name of the model, default `name`.

    The key is looked at and the counts are reported before `confirm` is asked, and `confirm` before the first call.
    """
    need("inspect_ai")
    with alone(path):
        todo = missing_items(items, path, name)
        connection = connected(spec or name, model_args) if todo else None
        report(f"{len(items) - len(todo)} answers are there; {forecast(todo, manner)}")
        if not todo or not confirm():
            return Outcome()
        language_models.append(path, [])  # a folder that cannot be written to is found out before the first answer is paid for
        return asyncio.run(_ask_all(todo, path, name, manner, report, connection))


def run(model: str, items: Sequence[Item], manner: Manner, report: Callable[[str], None], yes: bool = False, base_url: str | None = None,
        path: Path | None = None) -> Outcome:  # fmt: skip
    """What `rope-heads ask` does: the small model by one of its routes, or a provider's model, after the reader agreed to the counts."""
    path = path or language_models.file_of(model)
    if base_url is not None:
        check_url(base_url, model)
    if "/" not in model:
        if model not in (SMALL, SMALL_HTTP, SMALL_HF):
            raise ValueError(f"model must be {SMALL}, {SMALL_HTTP}, {SMALL_HF} or inspect's PROVIDER/MODEL, got {model!r}")
        from rope_heads import small_routes

        return small_routes.run(model, items, path, manner, report)
    more = {"base_url": base_url} if base_url else {}
    return ask(items, path, model, manner, report, confirm=lambda: yes or agreed(), **more)


def check_url(base_url: str, model: str) -> None:
    """ValueError unless `base_url` can be a server's address and `model` is asked there. The address itself is not shown: it may hold a password."""
    if "/" not in model:
        raise ValueError(f"--base-url is for models that a server answers for (openai-api/NAME/MODEL), {model} runs here: leave it out")
    try:
        address = urllib.parse.urlsplit(base_url)
        fine = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:  # a port that is none
        fine = False
    if not fine:
        raise ValueError("--base-url must look like https://HOST/v1 or http://127.0.0.1:PORT/v1")


def agreed() -> bool:
    """Asks on the terminal; ValueError without one, because nobody saw the counts."""
    if not sys.stdin.isatty():
        raise ValueError("no call was made: there is no terminal to agree on; add --yes")
    try:
        return input("make these calls? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # the input was closed instead of answered
        return False


def summary(outcome: Outcome) -> list[str]:
    """Lines that say what came back and what is missing, and why; none when no call was made."""
    if not outcome.calls and not outcome.missing:
        return []
    cost = f", at most {outcome.cost:.2f} US dollars (failed attempts counted as paid)" if outcome.cost else ""
    lines = [f"{outcome.answered} answers in {outcome.calls} calls; {outcome.input_tokens:,} input and {outcome.output_tokens:,} output tokens{cost}"]
    for reason, count in outcome.missing.most_common():
        told = outcome.example.get(reason)
        lines.append(f"missing {count}: {reason}" + (f"; for example: {told}" if told else ""))
    return lines + (["run the same command again to ask for what is missing"] if outcome.missing else [])
