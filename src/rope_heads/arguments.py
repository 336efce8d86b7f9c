"""The commands of `rope-heads` and their arguments, with what --help says about each. What they do is in `__main__`.

Nothing heavy is imported here, so that --help is fast. What a type can check is checked here: a bad value ends with one line and exit code 2.
"""

import argparse
import json

TASKS = ("number", "letter", "letter_proper", "letter_12", "letter_12_debiased", "number_64")  # as in audit_tasks.ALL_TASKS


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be > 0, got {text}")
    return value


def whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 0, got {text}")
    return int(text)


def count(text: str) -> int:
    if not 1 <= whole(text) <= 1024:
        raise argparse.ArgumentTypeError(f"must be 1 to 1024, got {text}")
    return whole(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def parameter(text: str) -> tuple:
    """`seed=3` as ("seed", 3); a value that is not a Python literal is a word."""
    import ast

    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"must look like NAME=VALUE, got {text!r}")
    try:
        literal = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
    try:
        json.dumps(literal, sort_keys=True)
    except TypeError:
        raise argparse.ArgumentTypeError(f"must be a number, a word, a list or a table, got {value}") from None
    return name, literal


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="rope-heads", description="Position or Symbol? Runs and checks the book.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    command = commands.add_parser(
        "book", help="execute the chapters and render the site",
        description="Executes each chapter that changed, one process a chapter, and renders the site to _build/html. Writes _build/ only (--freeze-values: data/values). "
        "Mode quick takes about a quarter of an hour on two cores, full takes days; a second run without changes takes seconds.")
    command.add_argument("--mode", choices=("quick", "full"), default="quick", help="quick: frozen runs where live ones take long; full: all anew")
    command.add_argument("--only", metavar="CHAPTER", help="execute this chapter alone and render a preview to _build/preview")
    command.add_argument("--without-solutions", action="store_true",
                         help="for a class: leave out all solutions, also from the notebooks that the pages offer, and render to "
                         "_build/html-teaching (executes each chapter as students get it; takes as long as the first build)")
    command.add_argument("--force", action="store_true", help="execute also what is up to date")
    command.add_argument("--parameter", metavar="NAME=VALUE", type=parameter, action="append", default=[],
                         help="a value for the chapters' parameters cells; a chapter that does not declare it fails")
    command.add_argument("--time-limit", metavar="MINUTES", type=positive,
                         help="longest time of a cell (default 30, full: 2 days); a chapter may take twice that")
    command.add_argument("--freeze-values", action="store_true",
                         help="build nothing; copy the claims' values of the last build (in mode quick) to data/values, where the scorecard reads them")

    command = commands.add_parser(
        "check-data", help="compare data/ with its manifest",
        description="Compares every file of data/ with data/manifest.json and names what is missing, altered or not listed. "
        "Takes a second; writes nothing unless --update is given.")
    command.add_argument("--update", action="store_true", help="write data/manifest.json anew from what is there")

    command = commands.add_parser(
        "train", help="train one model",
        description="Trains one model and writes RUNS/RECIPE/TASK-SEED/: model.safetensors, log.parquet (accuracy by hop count every 50 "
        "steps), run.json, and a checkpoint from which the same command goes on after an interruption. On one core about 10 minutes with recipe fast and 30 to 40 with paper.")
    command.add_argument("--task", required=True, choices=TASKS)
    command.add_argument("--recipe", default="fast", choices=("paper", "fast"), help="paper: the paper's values; fast (default): larger steps, in minutes")
    command.add_argument("--seed", type=whole, default=0, help="fixes initial weights, data, order and dropout (default 0)")
    command.add_argument("--set", metavar="NAME=VALUE", type=parameter, action="append", default=[],
                         help="change one value of the recipe (steps, batch, lr, warmup, weight_decay, dropout, clip, precision, long_share, "
                         "long_added, index_layers, ...) or of the model (layers, heads, nope_from, planes, ...); may be given several times")
    command.add_argument("--keep", metavar="STEP", type=whole, nargs="*", default=[], help="also keep the weights after these steps")
    command.add_argument("--until", metavar="ACCURACY", type=positive, help="stop as soon as every hop count reaches this accuracy")
    command.add_argument("--measure", action="store_true", help="also write measures.parquet: scores of every head at every evaluation (12-letter tasks: audit.parquet, counting against hopping)")
    command.add_argument("--runs", metavar="DIR", default="runs", help="where runs are written (default runs/)")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    command.add_argument("--threads", type=count, default=1, help="threads of this process (default 1: two runs side by side use two cores best)")

    command = commands.add_parser(
        "measure", help="measure a trained model once",
        description="Measures the final weights of a run and writes small tables into its folder: accuracy on the whole test split and "
        "without rotary planes (tests), where tokens look (looks, lens, planes, kinds), what happens when heads are changed (ablation, "
        "forbidden) and the verdict's numbers (mechanism). Weights kept on the way get the tables of looks. About 2 minutes on one idle core, "
        "3 seconds more for each kept step.")
    command.add_argument("--run", metavar="DIR", required=True, help="folder of one finished run, RUNS/RECIPE/TASK-SEED")
    command.add_argument("--threads", type=count, default=1)

    command = commands.add_parser(
        "lengths", help="measure a trained model on long inputs",
        description="Measures the final weights of a run with tokens put before the target window and writes lengths.parquet (accuracy by number "
        "of added tokens and hop count, with Wilson intervals) into its folder, with `main` also gaps.parquet (how far the logit of the key that "
        "each head should attend to stands above the next). Goes on where it stopped; what is measured is not measured again. On one idle "
        "core about 4 minutes for main, 1 for short, readings and crowds, 2 for kinds, 6 for changes, 5 for controls, 1 for windowed, 4 for sharper.")
    command.add_argument("--run", metavar="DIR", required=True, help="folder of one finished run, RUNS/RECIPE/TASK-SEED")
    command.add_argument("--what", nargs="+", choices=("main", "short", "readings", "kinds", "crowds", "changes", "controls", "windowed", "sharper"),
                         help="main (default): the grid of Figure 5B; short: eight lengths to 1,000; readings: Letter models on the other Letter data "
                         "with as many letters; kinds: other added tokens; crowds: keys of some added tokens with values of others; changes: planes "
                         "off, positions interpolated, logits sharper, a short view, weights in half precision; controls: as many other planes off, "
                         "logits three times as large; windowed: the short view alone; sharper: sharper logits on the whole grid, and among copies of "
                         "one token")
    command.add_argument("--added", nargs="+", metavar="N", type=whole, default=[], help="also these numbers of added tokens, or these alone without --what; "
                         "the time grows with the square of the length")
    command.add_argument("--threads", type=count, default=1)

    command = commands.add_parser(
        "collect", help="join finished runs into tables of data/",
        description="Writes data/runs/NAME/accuracy.parquet and, where they were measured, heads.parquet and the tables of measure, from the "
        "finished runs RUNS/RECIPE/*. Takes seconds, with --weights a minute for each of them. "
        "List the new tables with `rope-heads check-data --update`.")
    command.add_argument("--recipe", required=True, nargs="+", help="names of folders under RUNS")
    command.add_argument("--into", metavar="NAME", help="name of the folder under data/runs (default: the first recipe)")
    command.add_argument("--tasks", nargs="+", choices=TASKS, help="only runs of these tasks (default: all that are there)")
    command.add_argument("--seeds", nargs="+", type=whole, metavar="SEED", help="only runs of these seeds (default: all that are there)")
    command.add_argument("--only", nargs="+", metavar="TABLE", help="only these tables: accuracy, heads, tests, lengths, gaps, ... (default: all that are there but lengths and gaps)")
    command.add_argument("--weights", nargs="*", default=[], metavar="RUN",
                         help="also keep the final weights of these runs of the first recipe (number-0), in fp16 where that changes no accuracy")
    command.add_argument("--partial", action="store_true", help="take unfinished runs as far as they got")
    command.add_argument("--add", action="store_true", help="keep what these tables hold of other runs (default: they hold the runs that are there, no others)")
    command.add_argument("--runs", metavar="DIR", default="runs", help="where runs were written (default runs/)")

    command = commands.add_parser(
        "ask", help="put the one-hop tasks to a language model",
        description="Asks a language model for the answers that are not there yet and writes them to data/runs/language_models/MODEL.jsonl, each as "
        "soon as it comes (smollm2: a batch of up to 40 at a time). Looks for the key, shows the number of calls and tokens and asks before the "
        "first call. List the new answers with `rope-heads check-data --update`. Models: any name of inspect-ai (openai/gpt-5.4, "
        "anthropic/..., openai-api/NAME/MODEL), the key in the environment; smollm2, smollm2-http, smollm2-hf: a small model on this machine, free "
        "of charge, about 45 minutes on one idle core for all windows, 2 minutes for the two shortest; smollm2 makes no calls and takes no limits on "
        "them. Needs the extra llm.")
    command.add_argument("--model", required=True, help="for example openai/gpt-5.4 or smollm2")
    command.add_argument("--task", choices=("number", "letter"), nargs="+", default=("number", "letter"))
    command.add_argument("--setting", choices=("plain", "near", "commas", "lines", "words", "front", "twice"), nargs="+", default=["plain"],
                         help="plain (default): the paper's; the others are the controls of the chapter")
    command.add_argument("--windows", metavar="WORDS", type=whole, nargs="+", help="window sizes (default: the paper's eleven)")
    command.add_argument("--data-sets", metavar="N", type=count, default=5, help="data sets of 40 items a cell (default 5)")
    command.add_argument("--price", metavar=("IN", "OUT"), type=positive, nargs=2, help="US dollars a million input and output tokens")
    command.add_argument("--max-cost", metavar="DOLLARS", type=positive, help="make no call that could pass this; failed attempts count as paid")
    command.add_argument("--max-calls", metavar="N", type=whole, help="make at most so many calls")
    command.add_argument("--concurrency", metavar="N", type=count, default=8, help="calls at the same time (default 8)")
    command.add_argument("--retries", metavar="N", type=whole, default=4, help="further attempts for an item (default 4)")
    command.add_argument("--timeout", metavar="SECONDS", type=positive, default=60.0, help="longest time of an attempt (default 60)")
    command.add_argument("--base-url", metavar="URL", help="address of an OpenAI-compatible server, for models openai-api/NAME/MODEL")
    command.add_argument("--answers", metavar="DIR", help="folder of the answers (default data/runs/language_models)")
    command.add_argument("--yes", action="store_true", help="do not ask before the first call")

    command = commands.add_parser(
        "toy", help="train one toy model of induction, or join the finished ones",
        description="Trains a two-layer attention-only model of one arm (position scheme and constraint) until 200 steps after induction has "
        "formed, and writes RUNS/toys/ARM-SEED/ (toys,NAME=VALUE with another schedule): log.parquet (losses, gradient norms), heads.parquet (attention and spectra of every head every "
        "20 steps), run.json; the same command goes on after an interruption. 10 to 30 minutes on one core. --collect joins the finished runs "
        "of one schedule into data/runs/INTO/.")
    command.add_argument("--arm", metavar="ARM", help='for example "RoPE free"; a wrong name lists them')
    command.add_argument("--seed", type=whole, default=0, help="fixes initial weights and data (default 0)")
    command.add_argument("--set", metavar="NAME=VALUE", type=parameter, action="append", default=[],
                         help="change one value of the schedule (cap, after, every, batch, lr, warmup, weight_decay, clip, length, layers); "
                              "may be given several times")
    command.add_argument("--collect", action="store_true", help="join finished runs into data/runs/INTO/")
    command.add_argument("--into", metavar="NAME", default="toys", help="folder under data/runs (default toys)")
    command.add_argument("--add", action="store_true", help="with --collect: keep the runs that are in these tables already")
    command.add_argument("--runs", metavar="DIR", default="runs", help="where runs are written (default runs/)")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    command.add_argument("--threads", type=count, default=1)

    command = commands.add_parser(
        "fingerprint", help="measure the heads of a published model",
        description="Writes tables to data/runs/INTO: detectors, spectra with nulls, K-composition and, for rotary models, positional and "
        "symbolic scores and the phase ablation of every head. For smollm2 about 10 minutes on an idle core without the phase ablation, "
        "half an hour with it; what it has done lies in runs/INTO and is not done again. For whisper 2 minutes. "
        "List the new tables with `rope-heads check-data --update`.")
    command.add_argument("--model", required=True, help="smollm2 or whisper (installed with the package), a hub name, a folder, a GGUF file or a Whisper model.bin of CTranslate2")
    command.add_argument("--into", required=True, metavar="NAME", help="name of the folder under data/runs")
    command.add_argument("--revision", help="revision of a model of the hub, such as step1000")
    command.add_argument("--only", metavar="TABLE", nargs="+", default=[], help="default: all tables that the model can have")
    command.add_argument("--ablated", metavar="N", type=count, default=16, help="sequences of the phase ablation (default 16); more can be added later")
    command.add_argument("--threads", type=count, default=1)

    command = commands.add_parser(
        "bench", help="measure speed, as ratios",
        description="Prints sequences a second of each task, the speed of a training step and of long inputs against Hugging Face's GPT-J, of "
        "scores against brute force and of head spectra against whole matrices, measured in turns in one process. Takes about three minutes on an idle core; writes nothing.")
    command.add_argument("--only", choices=("sequences", "training", "scores", "spectra", "lengths"), nargs="+", help="default: all")
    command.add_argument("--threads", type=count, default=1)
    return parser
