"""Everything the book measures on the heads of a real model, as small tables in data/runs/<name>: `rope-heads fingerprint`.

Each table is written on its own and names the command that makes it again. The long one, the phase ablation of every head, keeps its
progress in a file of lines and goes on where it stopped.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd
import torch
from torch import nn

from rope_heads import artefacts, binding, ctranslate2, detectors, pretrained
from rope_heads.phase_ablation import CONTROLS, PhaseAblation, random_change
from rope_heads.pretrained import Heads
from rope_heads.spectra import MEASURES, NULL_MEASURES, qk_spectrum, random_null, rope_parts, singular_values

TABLES = {  # file -> what a row is
    "detectors": "mean attention of a head on the detectors' keys, over repeated random tokens",
    "spectra": "a head's spectral measures, with the mean and sd of its own null",
    "composition": "how much one of the ten strongest induction heads reads of one earlier head",
    "scores": "positional and symbolic score of a head, over binding prompts",
    "planes": "the same for each rotary plane of a head taken alone",
    "phase": "second-copy loss after the sine part of one head's logits is taken out",
    "control": "the same after a random change of equal norm in that head, and after everything but the phase, or all, is taken out",
}
ROTARY, SPOKEN = ("scores", "planes", "phase", "control"), ("scores", "planes")  # need RoPE; need a tokenizer of text
LENGTH = 64  # of r
ABLATED, BLOCK = 16, 4  # sequences of the phase ablation, and how many of them run together
WITHOUT = ("even part", "all logits")  # what else is taken out of those heads: all but the phase; everything, so that attention is uniform
STRONGEST = 5  # heads by phase effect and by previous-token attention that get controls


class Measures:
    """Loads a model once, on demand, and makes its tables. `into` names the folder under data/runs; progress lies in runs/<into>."""

    def __init__(self, source: str, into: str, revision: str | None = None, *, sequences: int = 200, ablated: int = ABLATED, draws: int = 300,
                 prompts: int = 256, plane_prompts: int = 64, control_draws: int = 5, data: Path | None = None, progress: Path | None = None,
                 report: Callable[[str], None] = print):  # fmt: skip
        if into in ("", ".", "..") or "/" in into or "\\" in into:
            raise ValueError(f"into must be a single folder name, got {into!r}")
        self.source, self.into, self.revision, self.report = source, into, revision, report
        self.sequences, self.ablated, self.draws = sequences, ablated, draws
        self.prompts, self.plane_prompts, self.control_draws = prompts, plane_prompts, control_draws
        self.folder = (data or artefacts.data_folder()) / "runs" / into
        self.progress = (progress or Path("runs")) / into
        self._model: nn.Module | None = None
        self._heads: Heads | None = None

    @property
    def model(self) -> nn.Module:
        if self._model is None:
            self._model = pretrained.load_model(self.source, self.revision)
        return self._model

    @property
    def heads(self) -> Heads:
        if self._heads is None:
            self._heads = pretrained.extract(self.model, str(self.source))
        return self._heads

    def tables(self) -> list[str]:
        """Names of the tables that this model can have."""
        rotary, spoken = self.heads.positions == "rope", not self.model.config.is_encoder_decoder
        return [name for name in TABLES if (rotary or name not in ROTARY) and (spoken or name not in SPOKEN)
                and (len(self.heads.blocks) > 1 or name != "composition")]  # fmt: skip

    def write(self, only: Iterable[str] = ()) -> dict[str, int]:
        """Writes the tables `only` (default all) and returns the number of rows of each. ValueError when the folder holds another model's."""
        for name in TABLES:
            self._present(name)
        can = self.tables()
        cannot = sorted(set(only) - set(can))
        if cannot:
            raise ValueError(f"{self.source} has no table {', '.join(cannot)}: this model can have {', '.join(can)}")
        rows = {}
        for name in only or can:
            start, cpu = time.perf_counter(), time.process_time()
            found, more = getattr(self, f"_{name}")()
            command = f"rope-heads fingerprint --model {self.source} --into {self.into} --only {name}" + (f" --revision {self.revision}" if self.revision else "")
            if name in ("phase", "control") and self.ablated != ABLATED:
                command += f" --ablated {self.ablated}"
            more |= {"revision": self.revision} if self.revision else {}
            origin = artefacts.provenance(command, round(more.pop("seconds", time.process_time() - cpu), 1), 0, model=str(self.source), **more)
            artefacts.write_parquet(self.folder / f"{name}.parquet", pd.DataFrame(found), origin)
            rows[name] = len(found)
            self.report(f"{name}: {len(found)} rows, {time.perf_counter() - start:.0f} s")
        return rows

    # ---- one method a table: (rows, what the provenance says besides) ------------------------------------------------------------

    def _repeated(self, count: int, words: list[int] | None = None) -> torch.Tensor:
        config = self.model.config
        ids = words or (config.eos_token_id if config.model_type == "whisper" else config.vocab_size)  # Whisper's later ids are no text
        return detectors.repeated_tokens(count, LENGTH, ids, detectors.start_token(self.model))

    def _detectors(self):
        kinds = {"uniform": None}
        if self.model.config.model_type == "whisper":
            kinds["common words"] = detectors.common_words(self._vocabulary())
        rows = []
        for kind, words in kinds.items():
            found = detectors.detect(self.model, self.heads, self._repeated(self.sequences, words))
            rows += [{"tokens": kind, **row} for row in self._by_head(found)]
        return rows, {"sequences": self.sequences, "length": LENGTH}

    def _spectra(self):
        layers, singular = [], []
        for block in self.heads.blocks:  # one at a time: the weights of a large model in float64 fill the memory
            w_q, w_k = block.folded()  # [head, width, d_head]
            spectrum = qk_spectrum(w_q, w_k)
            layers.append({name: getattr(spectrum, name) for name in MEASURES})
            singular.append(singular_values(w_q, w_k))
            if self.heads.positions == "rope":
                parts = rope_parts(w_q, w_k, block.attention.pairing, self.heads.rotary_dim)
                layers[-1] |= {"rope_imag_frac": parts.rope_imag_frac(), "frequency_centroid": parts.frequency_centroid(block.attention.angles)}
        found = {name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}  # [layer, head]
        null = random_null(torch.cat(singular), self.heads.blocks[0].norm.weight.numel(), self.draws, centred=self.heads.blocks[0].centred)
        for name in NULL_MEASURES:
            mean, sd = (values[name].view_as(found[name]) for values in (null.mean, null.sd))
            found |= {f"{name}_null": mean, f"{name}_null_sd": sd, f"{name}_z": (found[name] - mean) / sd}
        return self._by_head(found), {"draws": self.draws}

    def _composition(self):
        table = self._frozen("detectors")
        strongest = table[table.tokens == "uniform"].nlargest(10, "induction")
        rows = []
        for layer, head in zip(strongest.layer, strongest["head"]):
            if layer == 0:
                continue
            found = detectors.k_composition(self.heads, int(layer), int(head))
            rows += [{"layer": int(layer), "head": int(head), "earlier_layer": i, "earlier_head": j, "k_composition": float(found[i, j])}
                     for i in range(len(found)) for j in range(self.heads.heads)]  # fmt: skip
        return pd.DataFrame(rows, columns=["layer", "head", "earlier_layer", "earlier_head", "k_composition"]), {}

    @property
    def _path(self) -> Path:
        return pretrained.installed(self.source) if self.source in pretrained.INSTALLED else Path(self.source)

    def _tokenizer(self):
        import transformers

        where, more = (self._path.parent, {"gguf_file": self._path.name}) if self._path.suffix == ".gguf" else (self.source, {"revision": self.revision or "main"})
        try:
            return transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False, **more)
        except ImportError:
            raise
        except Exception as error:  # each reader of a format raises errors of its own
            told = " ".join(str(error).split())[:300]
            raise OSError(f"{self.source} has no tokenizer that can be read, which {' and '.join(SPOKEN)} need: {told}") from None

    def _vocabulary(self) -> list[str]:
        """Tokens of text, by id."""
        if self._path.suffix == ".bin":
            return ctranslate2.vocabulary(self._path)
        return self._tokenizer().convert_ids_to_tokens(range(self.model.config.eos_token_id))

    def _scores(self):
        tokenizer = self._tokenizer()
        prompts = binding.prompts(tokenizer, detectors.start_token(self.model), self.prompts)
        streams = binding.streams(self.model, prompts)
        found = [binding.head_scores(self.heads, layer, hidden, prompts.sentences) for layer, hidden in enumerate(streams)]
        colour, token = binding.accuracy(self.model, prompts)
        more = {"prompts": self.prompts, "example": tokenizer.decode(prompts.tokens[0].tolist()), "right_colour": colour, "right_token": token}
        return self._by_head({name: torch.stack([layer[name] for layer in found]) for name in found[0]}), more

    def _planes(self):
        prompts = binding.prompts(self._tokenizer(), detectors.start_token(self.model), self.prompts).first(self.plane_prompts)
        rows = []
        for layer, hidden in enumerate(binding.streams(self.model, prompts)):
            found = {name: value.tolist() for name, value in binding.plane_scores(self.heads, layer, hidden).items()}
            rows += [{"layer": layer, "head": head, "plane": plane + 1} | {name: value[head][plane] for name, value in found.items()}
                     for head in range(self.heads.heads) for plane in range(self.heads.rotary_dim // 2)]  # fmt: skip
            self.report(f"planes: layer {layer}")
        return rows, {"prompts": self.plane_prompts}

    def _phase(self):
        """All heads on the first few sequences, then on the next few: a run that is stopped can be read with fewer sequences."""
        previous = self._frozen("detectors").query("tokens == 'uniform'").set_index(["layer", "head"]).previous
        first = previous.nlargest(20).index.tolist()  # what matters most, in case the rest has to wait
        order = first + sorted((pair for pair in previous.index if pair not in first), reverse=True)

        def ablate(work: PhaseAblation, layer: int, head: int) -> dict:
            return {"loss": work.losses(layer, head).tolist(), "mean_square": float(work.sines(layer, head).square().mean())}

        return self._ablated("phase", [(*pair,) for pair in order], ["layer", "head"], ablate)

    def _control(self):
        """Random changes for the heads with the largest effect and the strongest previous-token heads."""
        previous = self._frozen("detectors").query("tokens == 'uniform'").nlargest(STRONGEST, "previous")
        effect = self._frozen("phase").nlargest(STRONGEST, "increase")
        pairs = pd.concat([effect, previous])[["layer", "head"]].drop_duplicates().itertuples(index=False)
        kinds = [(kind, draw) for kind in CONTROLS for draw in range(self.control_draws)] + [(kind, 0) for kind in WITHOUT]
        jobs = [(*map(int, pair), *kind) for pair in pairs for kind in kinds]

        def change(work: PhaseAblation, layer: int, head: int, kind: str, draw: int) -> dict:
            sines, logits = work.sines(layer, head), work.logits(layer, head)
            taken = {"even part": logits - sines, "all logits": logits}
            subtracted = taken[kind] if kind in taken else random_change(sines, kind, torch.Generator().manual_seed(draw))
            return {"loss": work.losses(layer, head, subtracted).tolist()}

        return self._ablated("control", jobs, ["layer", "head", "kind", "draw"], change)

    def _ablated(self, name: str, jobs: list[tuple], names: list[str], work: Callable[..., dict]):
        """Rows of all jobs over all sequences, `BLOCK` sequences at a time; each job and block is one line of the progress file."""
        tokens = self._repeated(self.ablated)
        parts, losses = {job: [] for job in jobs}, {"before": [], "first_copy": []}
        with Progress(self.progress / f"{name}.jsonl", {"model": str(self.source), "revision": self.revision, "length": LENGTH, "block": BLOCK}) as done:
            for start in range(0, len(tokens), BLOCK):
                ablation = PhaseAblation(self.model, self.heads, tokens[start : start + BLOCK])
                losses["before"].append(ablation.baseline)
                losses["first_copy"].append(ablation.first_copy)
                known = done((start, len(ablation.tokens), "before"), lambda ablation=ablation: {"loss": ablation.baseline.tolist()})["loss"]
                if not torch.allclose(torch.tensor(known), ablation.baseline, atol=1e-3):
                    raise ValueError(f"{done.path} was made with other weights under the name {self.source}: its loss before any change is "
                                     f"{sum(known) / len(known):.3f}, now {ablation.baseline.mean():.3f}; remove it")  # fmt: skip
                for job in jobs:
                    parts[job].append(done((start, len(ablation.tokens), *job), lambda job=job, ablation=ablation: work(ablation, *job)))
                    if done.new:
                        self.report(f"{name}: sequences {start} to {start + len(ablation.tokens) - 1}, {job}, loss {ablation.baseline.mean():.3f} -> "
                                    f"{sum(parts[job][-1]['loss']) / len(ablation.tokens):.3f}")  # fmt: skip
        before, first = (torch.cat(losses[copy]) for copy in ("before", "first_copy"))
        rows, seconds = [], 0.0
        for job, found in parts.items():
            loss = torch.tensor([value for part in found for value in part["loss"]])
            increase = loss - before
            rows.append(dict(zip(names, job)) | {"loss": float(loss.mean()), "increase": float(increase.mean()), "increase_sd": float(increase.std()) if len(increase) > 1 else math.nan,
                                                 "share": float(increase.mean() / (first - before).mean())})  # fmt: skip
            if "mean_square" in found[0]:
                weights = [len(part["loss"]) for part in found]
                rows[-1]["sine_rms"] = (sum(w * part["mean_square"] for w, part in zip(weights, found)) / sum(weights)) ** 0.5
            seconds += sum(part["seconds"] for part in found)
        more = {"sequences": len(tokens), "length": LENGTH, "before": float(before.mean()), "first_copy": float(first.mean()), "seconds": seconds}
        return sorted(rows, key=lambda row: [row[column] for column in names]), more

    def _present(self, name: str) -> pd.DataFrame | None:
        """A table that is there, or None. ValueError when it is of another model, or no table at all."""
        path = self.folder / f"{name}.parquet"
        if not path.exists():
            return None
        try:
            frame, told = artefacts.read_parquet(path)
        except (ValueError, OSError) as error:  # pyarrow raises either for a cut file
            raise ValueError(f"{path} cannot be read as a table ({error}): remove it or use another --into") from None
        made = told.get("model"), told.get("revision")
        if made != (str(self.source), self.revision):
            raise ValueError(f"{path} belongs to {made[0]}{f' at {made[1]}' if made[1] else ''}, not to {self.source}"
                             f"{f' at {self.revision}' if self.revision else ''}: use another --into, or remove that folder's tables")  # fmt: skip
        return frame

    def _frozen(self, name: str) -> pd.DataFrame:
        found = self._present(name)
        if found is None:
            raise ValueError(f"{self.folder / name}.parquet is needed first: rope-heads fingerprint --model {self.source} --into {self.into} --only {name}")
        return found

    def _by_head(self, found: dict[str, torch.Tensor]) -> list[dict]:
        """Rows of values [layer, head]."""
        values = {name: value.tolist() for name, value in found.items()}
        return [{"layer": layer, "head": head} | {name: value[layer][head] for name, value in values.items()}
                for layer in range(len(self.heads.blocks)) for head in range(self.heads.heads)]  # fmt: skip


class Progress:
    """Results of long work, one line of JSON a job: `progress(key, work)` returns what stands there, or does the work and writes it down."""

    def __init__(self, path: Path, identity: dict):
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        head = json.dumps(identity)
        if lines and lines[0] != head:
            if len(lines) > 1 or not head.startswith(lines[0]):
                raise ValueError(f"{path} belongs to {lines[0][:200]!a}, expected {head}: remove it or use another --into")
            lines = []  # stopped while it wrote the first line
        self.path, self.new = path, False
        self.done: dict[tuple, dict] = {}
        for line in lines[1:]:
            with contextlib.suppress(ValueError, TypeError, KeyError, IndexError):  # cut when a run stopped, or damaged: done again
                key, value = json.loads(line)
                if len(value["loss"]) == key[1] and all(map(math.isfinite, (*value["loss"], value["seconds"]))):
                    self.done[tuple(key)] = value
        self.file = open(path, "a" if lines else "w", encoding="utf-8")
        self.file.write("\n" if lines else head + "\n")
        self.file.flush()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __call__(self, key: tuple, work: Callable[[], dict]) -> dict:
        self.new = key not in self.done
        if self.new:
            cpu = time.process_time()
            self.done[key] = work() | {"seconds": round(time.process_time() - cpu, 2)}
            self.file.write(json.dumps([key, self.done[key]]) + "\n")
            self.file.flush()
        return self.done[key]
