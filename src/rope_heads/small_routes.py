"""SmolLM2-135M-Instruct asked by three routes: in this process, over HTTP on this machine, and through inspect-ai's local provider."""

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rope_heads import artefacts, language_models, loopback, one_hop, small_model
from rope_heads.asking import SMALL, SMALL_HF, SMALL_HTTP, Manner, Outcome, alone, ask, missing_items, need, today
from rope_heads.one_hop import Item


def ranks(item: Item, log_probabilities: dict[str, float]) -> dict:
    """The fields of a record that only a model in this process can fill, from the log-probability of each word of the window.

    `near_rank` is the control for closeness: words at the distances of `near` that nobody asks for. Left out where there are none.
    """
    found = {"rank": small_model.rank(log_probabilities, item.answer), "candidates": len(log_probabilities),
             "top": max(log_probabilities, key=log_probabilities.get)}  # fmt: skip
    others = set(item.words[:-1][-one_hop.NEAR :]) - {item.answer}
    return {**found, "near_rank": round(small_model.mean_rank(log_probabilities, others), 3)} if others else found


def ask_small(items: Sequence[Item], path: Path, report: Callable[[str], None], small=None) -> None:
    """Answers, ranks and most probable words of SmolLM2 for the items that lack them, cell by cell."""
    need("transformers", "gguf", "accelerate")
    with alone(path):
        todo = missing_items(items, path, SMALL)
        report(f"{len(todo)} answers to make, the others are there; nothing is paid for")
        if not todo:
            return
        small = small or small_model.SmallModel.load()
        cuts = [{"task": t, "setting": s, "pieces": small.cut(one_hop.row(one_hop.items(t, 12, 0, s)[0]))} for s, tasks in one_hop.SETTINGS.items() for t in tasks]
        artefacts.write_json(path.with_suffix(".pieces.json"), cuts, artefacts.provenance(f"rope-heads ask --model {SMALL}"))
        cells: dict[tuple, list[Item]] = {}
        for item in todo:
            cells.setdefault((item.task, item.setting, item.window, item.data_set), []).append(item)
        for number, (cell, members) in enumerate(cells.items(), 1):
            chats, words = [one_hop.prompt(item) for item in members], [item.words[:-1] for item in members]
            for i, reply in small.replies(chats, words):
                found = ranks(members[i], reply.log_probabilities)
                record = language_models.record(members[i], SMALL, today(), reply.text, reply.input_tokens, reply.output_tokens, **found)
                language_models.append(path, [record])
            report(f"cell {number}/{len(cells)}: task {cell[0]}, setting {cell[1]}, window {cell[2]}, data set {cell[3]}")


def ask_small_http(items: Sequence[Item], path: Path, manner: Manner, report: Callable[[str], None], small=None) -> Outcome:
    """SmolLM2 behind an OpenAI-compatible server on 127.0.0.1: the way a hosted model is asked, with a real socket between."""
    need("inspect_ai", "openai", "transformers", "gguf", "accelerate")
    small = small or small_model.SmallModel.load()
    with loopback.serving(loopback.completions(small)) as address:
        return ask(items, path, SMALL_HTTP, manner, report, f"openai-api/loopback/{small_model.NAME}", base_url=address, api_key="not-needed")


def ask_small_hf(items: Sequence[Item], path: Path, manner: Manner, report: Callable[[str], None], small=None) -> Outcome:
    """SmolLM2 through inspect's local Hugging Face provider, from a temporary folder with the weights as plain numbers."""
    need("inspect_ai", "transformers", "gguf", "accelerate")
    small = small or small_model.SmallModel.load()
    with tempfile.TemporaryDirectory(prefix="rope-heads-") as folder:
        small_model.export(Path(folder), small.model, small.tokenizer)
        return ask(items, path, SMALL_HF, manner, report, f"hf/{small_model.NAME}", model_path=folder, tokenizer_path=folder, device="cpu",
                   do_sample=False)


def run(model: str, items: Sequence[Item], path: Path, manner: Manner, report: Callable[[str], None]) -> Outcome:
    """One of the three routes. In this process there are no calls: limits on them are refused instead of ignored."""
    if model != SMALL:
        return {SMALL_HTTP: ask_small_http, SMALL_HF: ask_small_hf}[model](items, path, manner, report)
    given = [f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(Manner) if getattr(manner, f.name) != f.default]
    if given:
        raise ValueError(f"{', '.join(given)}: {SMALL} answers in this process, without calls that could be limited: leave out, or ask {SMALL_HTTP}")
    ask_small(items, path, report)
    return Outcome()  # no calls: nothing is missing that the same command does not make
