"""The one-hop tasks as an inspect-ai task, for `inspect eval`; needs the extra llm, which is why no other module imports this one.

    inspect eval src/rope_heads/inspect_task.py --model openai/gpt-5.4 -T task=number -T windows=12,16 --max-retries 4 --timeout 60

Answers that stand in the file of `rope-heads ask` for the same model are read there and not asked again; new ones are added to it.
"""

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import GenerateConfig, ModelOutput
from inspect_ai.scorer import Score, accuracy, scorer, stderr
from inspect_ai.solver import solver

from rope_heads import asking, language_models, one_hop


@solver
def answer_once(answers: str = ""):
    """The answer in the file, else the model's, which is then added to the file."""

    async def solve(state, generate):
        item, name = item_of(state.metadata), str(state.model)
        path = language_models.file_of(name, Path(answers) if answers else None)
        digest = language_models.prompt_hash(item)
        have = [r for r in language_models.read(path) if (r["model"], r["prompt"]) == (name, digest)]
        if have:
            state.output = ModelOutput.from_content(name, have[0]["answer"])
            return state
        state = await generate(state)
        if state.output.choices and not state.output.error:
            usage = state.output.usage
            tokens = (max(0, usage.input_tokens), max(0, usage.output_tokens)) if usage else (0, 0)
            answer = asking.redacted(state.output.completion)
            language_models.append(path, [language_models.record(item, name, asking.today(), answer, *tokens)])
        return state

    return solve


@scorer(metrics=[accuracy(), stderr()])
def exact():
    """1 for the right word, else 0; the explanation names the kind of answer."""

    async def score(state, target):
        kind = one_hop.classify(state.output.completion, item_of(state.metadata))
        return Score(value=int(kind == "right"), answer=one_hop.bare(state.output.completion), explanation=kind)

    return score


def item_of(metadata: dict):
    return one_hop.items(metadata["task"], metadata["window"], metadata["data_set"], metadata["setting"])[metadata["number"]]


def numbers(text) -> list[int]:
    """`12,16`, 12 or [12, 16] as a list: inspect reads a task argument in any of these forms."""
    return [int(n) for n in (text if isinstance(text, list) else str(text).split(","))]


@task
def one_hop_task(task: str = "number", setting: str = "plain", windows: str = "12,16,24,32,48,64,80,100,150,200,300", data_sets: int = 5,
                 answers: str = ""):  # fmt: skip
    """`answers`: folder of the answers, default data/runs/language_models."""
    samples = [
        Sample(id=f"{i.task}-{i.setting}-{i.window}-{i.data_set}-{i.number}", input=asking.chat_messages(i), target=i.answer,
               metadata={"task": i.task, "setting": i.setting, "window": i.window, "data_set": i.data_set, "number": i.number})
        for i in language_models.plan([task], [setting], numbers(windows), data_sets)
    ]  # fmt: skip
    return Task(MemoryDataset(samples), solver=answer_once(answers), scorer=exact(), config=GenerateConfig(max_tokens=16))
