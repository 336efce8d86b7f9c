"""Command line `rope-heads`: what each command does. The arguments are declared in `arguments`; heavy modules are imported when a command runs.

A handler that finds a bad value raises argparse.ArgumentTypeError: one line on stderr and exit code 2.
"""

import argparse
import math
import sys

from rope_heads.arguments import build_parser


def book(arguments) -> int:
    from rope_heads import contents, pages
    from rope_heads.artefacts import repository

    if "mode" in dict(arguments.parameter):
        raise argparse.ArgumentTypeError("--parameter mode: use --mode, which the pages show")
    root = repository()
    if root is None:
        raise argparse.ArgumentTypeError("works in a checkout of the repository only: clone it and run `make book` there")
    if arguments.freeze_values:
        from rope_heads import scorecard

        reason = pages.not_to_freeze(root / "_build")
        if reason:
            raise argparse.ArgumentTypeError(f"--freeze-values: {reason}; run `rope-heads book` first")
        frozen = scorecard.freeze(root / "_build" / "values", [notebook.stem for notebook in contents.chapters(root)])
        print(f"data/values now holds what these chapters recorded last: {', '.join(frozen) or 'none'}")
        return 0
    try:
        notebooks = contents.chapters(root)
        for notebook in notebooks:
            contents.check_chapter(root, notebook)
    except contents.ChapterError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    names = [path.stem for path in notebooks]
    if arguments.only and arguments.only not in names:
        raise argparse.ArgumentTypeError(f"--only: no chapter is called {arguments.only!r}; there are: {', '.join(names)}")
    return pages.build(root, mode=arguments.mode, only=arguments.only, force=arguments.force, minutes=arguments.time_limit,
                       extra=dict(arguments.parameter), solutions=not arguments.without_solutions)


def check_data(arguments) -> int:
    from rope_heads import artefacts

    folder = artefacts.data_folder()
    if arguments.update:
        try:
            print(f"data/manifest.json lists {artefacts.write_manifest(folder)} files")
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"--update: {error}") from None
        return 0
    count, problems = artefacts.check_data(folder)
    for problem in problems:
        print(f"data/{problem}", file=sys.stderr)
    print(f"{count} files listed in data/manifest.json, {len(problems)} problems" if problems else f"all {count} files of data/ are as listed")
    return 1 if problems else 0


def train(arguments) -> int:
    import torch

    from rope_heads import counting
    from rope_heads.audit_tasks import ALL_TASKS
    from rope_heads.recipes import RECIPES, configured
    from rope_heads.training import Run, run_folder
    from rope_heads.trajectory import Trajectory

    torch.set_num_threads(arguments.threads)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("--device cuda: no CUDA device here; use --device cpu")
    try:
        recipe, config = configured(RECIPES[arguments.recipe], dict(arguments.set))
        folder = run_folder(arguments.runs, arguments.task, recipe.name, arguments.seed)
        measure = None
        if arguments.measure:
            counts = arguments.task in counting.TASKS
            measure = counting.Conflicting(arguments.seed) if counts else Trajectory(ALL_TASKS[arguments.task], arguments.seed, recipe.steps)
        run = Run(arguments.task, recipe, arguments.seed, folder, keep=arguments.keep, config=config, device=arguments.device, measure=measure,
                  until=arguments.until, report=lambda line: print(line, flush=True))
        run.train()
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    print(f"{run.title}: finished, {folder}")
    return 0


def measure(arguments) -> int:
    import torch

    from rope_heads import final

    torch.set_num_threads(arguments.threads)
    try:
        rows = final.measure_run(arguments.run, report=lambda line: print(line, flush=True))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    for table, number in rows.items():
        print(f"{arguments.run}/{table}.parquet: {number} rows")
    return 0


def lengths(arguments) -> int:
    import torch

    from rope_heads import lengths

    torch.set_num_threads(arguments.threads)
    try:
        rows = lengths.measure_run(arguments.run, ["main"] if arguments.what is None and not arguments.added else arguments.what or [], arguments.added,
                                   report=lambda line: print(line, flush=True))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    print(f"{arguments.run}/lengths.parquet: {rows} rows")
    return 0


def collect(arguments) -> int:
    from pathlib import Path

    from rope_heads import runs

    try:
        into = arguments.into or arguments.recipe[0]
        rows = runs.collect(Path(arguments.runs), arguments.recipe, into, partial=arguments.partial, tasks=arguments.tasks, seeds=arguments.seeds,
                            only=arguments.only, add=arguments.add)
        runs.keep_weights(Path(arguments.runs), arguments.recipe[0], arguments.weights, into)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    for table, number in rows.items():
        print(f"data/runs/{into}/{table}.parquet: {number} rows{' added or made again' * arguments.add}")
    return 0


def ask(arguments) -> int:
    from pathlib import Path

    import torch

    from rope_heads import asking, language_models, one_hop

    torch.set_num_threads(1)
    price = language_models.Price(*arguments.price) if arguments.price else None
    if arguments.max_cost is not None and price is None:
        raise argparse.ArgumentTypeError("--max-cost needs --price IN OUT, the model's prices in US dollars a million tokens")
    manner = asking.Manner(timeout=arguments.timeout, retries=arguments.retries, concurrency=arguments.concurrency, price=price,
                           max_cost=arguments.max_cost, max_calls=arguments.max_calls)  # fmt: skip
    try:
        items = language_models.plan(arguments.task, arguments.setting, arguments.windows or one_hop.WINDOWS, arguments.data_sets)
        outcome = asking.run(arguments.model, items, manner, lambda line: print(line, flush=True), yes=arguments.yes, base_url=arguments.base_url,
                             path=language_models.file_of(arguments.model, Path(arguments.answers) if arguments.answers else None))  # fmt: skip
    except (ImportError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    for line in asking.summary(outcome):
        print(line)
    return 1 if outcome.missing else 0


def toy(arguments) -> int:
    import torch

    from rope_heads import induction_runs

    torch.set_num_threads(arguments.threads)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("--device cuda: no CUDA device here; use --device cpu")
    if arguments.collect == (arguments.arm is not None):
        raise argparse.ArgumentTypeError("pass --arm to train a run, or --collect alone to join finished runs")
    try:
        schedule = induction_runs.schedule(dict(arguments.set))
        if arguments.collect:
            for table, number in induction_runs.collect(arguments.runs, schedule=schedule, into=arguments.into, add=arguments.add).items():
                print(f"data/runs/{arguments.into}/{table}.parquet: {number} rows")
            return 0
        folder = induction_runs.run_folder(arguments.runs, arguments.arm, arguments.seed, schedule)
        run = induction_runs.ToyRun(arguments.arm, arguments.seed, folder, schedule, arguments.device,
                                    report=lambda line: print(line, flush=True))  # fmt: skip
        formed = run.train()
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    when = f"formed at step {formed:g}" if math.isfinite(formed) else f"has not formed by step {schedule.cap}"
    print(f"{arguments.arm} seed {arguments.seed}: induction {when}, {folder}")
    return 0


def fingerprint(arguments) -> int:
    import torch

    from rope_heads.fingerprint import TABLES, Measures

    unknown = sorted(set(arguments.only) - set(TABLES))
    if unknown:
        raise argparse.ArgumentTypeError(f"--only: no table is called {', '.join(unknown)}; there are: {', '.join(TABLES)}")
    torch.set_num_threads(arguments.threads)
    try:
        Measures(arguments.model, arguments.into, arguments.revision, ablated=arguments.ablated, report=lambda line: print(line, flush=True)).write(arguments.only)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    except ImportError as error:
        raise argparse.ArgumentTypeError(f"{error}; install the package with its extra, in the checkout: .venv/bin/python -m pip install -e '.[heads]'") from None
    return 0


def bench(arguments) -> int:
    from rope_heads import bench

    bench.main(arguments.only or list(bench.BENCHES), arguments.threads, report=lambda line: print(line, flush=True))
    return 0


HANDLERS = {"book": book, "check-data": check_data, "train": train, "measure": measure, "lengths": lengths, "collect": collect, "ask": ask, "toy": toy,
            "fingerprint": fingerprint, "bench": bench}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        return HANDLERS[arguments.command](arguments) or 0
    except argparse.ArgumentTypeError as error:
        print(f"rope-heads {arguments.command}: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, a folder that is a file, a file that is not there
        print(f"rope-heads {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"rope-heads {arguments.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
