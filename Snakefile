"""Regenerates data/runs from nothing, one step of the command line a rule:

    snakemake -n data                                    what would be done
    snakemake -c2 data                                   all of it, two jobs at a time, one thread each
    snakemake -c2 fast                                   the tables of one folder of data/runs
    snakemake -c2 data --config recipe=fast seeds=0-1    fewer runs (also tasks=number,letter keep=0,1000 set=dropout=0.1 weights=number-0 runs=FOLDER)

On a cluster with shared files any executor of Snakemake's takes the jobs, here with a submit command of your own:

    snakemake --jobs 40 data --executor cluster-generic --cluster-generic-submit-cmd "sbatch --parsable"

Training goes on from its last checkpoint when the same command is given again (after a killed Snakemake: `snakemake --unlock` first). Finished
runs are not made again when the code changes, nor are tables that are there: remove what shall be made again.
"""

import sys

# What is trained for each folder of data/runs. `set`: changes to the recipe, written as in the name of the run's folder ("dropout=0.1").
# `keep`: steps whose weights are kept beside the run, and measured too. `weights`: runs whose final weights go to data/ (5 MB each).
FOLDERS = {
    "paper": {"recipe": "paper", "set": "", "tasks": "number,letter,letter_proper", "seeds": "0-7", "keep": "0,1000,2000,2500,3000,4000",
              "weights": "number-0,letter-0"},
    "fast": {"recipe": "fast", "set": "", "tasks": "number,letter", "seeds": "0-4", "keep": "0,250,500,750,1000,1500", "weights": ""},
}
RUNS = config.get("runs", "runs")  # where the runs themselves are kept; not part of the repository
ROPE_HEADS = config.get("command", f"{sys.executable} -m rope_heads")


def listed(value) -> list[str]:
    """"0-2,5" as ["0", "1", "2", "5"]; words are themselves, nothing (as --config gives it) is an empty list."""
    out = []
    for part in [] if value in (None, "") else str(value).split(","):
        first, _, last = part.partition("-")
        out += map(str, range(int(first), int(last) + 1)) if first.isdigit() and last else [part]
    return out


def chosen() -> dict[str, dict]:
    """`FOLDERS`, or what --config makes of it: a changed recipe goes to a folder of its own, `into` (default RECIPE-changed)."""
    wanted = listed(config["recipe"]) if "recipe" in config else list(FOLDERS)
    unknown = [name for name in wanted if name not in FOLDERS]
    if unknown:
        raise WorkflowError(f"recipe must be one of {', '.join(FOLDERS)}, got {unknown[0]}")
    found = {}
    for name in wanted:
        folder = FOLDERS[name] | {key: config[key] for key in ("set", "tasks", "seeds", "keep", "weights") if key in config}
        folder = {key: listed(value) for key, value in folder.items()}
        found[config.get("into", f"{name}-changed") if "set" in config else name] = folder
    return found


CHOSEN = chosen()
TABLES = {name: f"data/runs/{name}/mechanism.parquet" for name in CHOSEN}  # the last table that `collect` writes

shell.prefix("set -euo pipefail; export OMP_NUM_THREADS=1; ")
wildcard_constraints:
    task="[a-z_]+", seed=r"\d+",
localrules: data, manifest


rule data:
    input: TABLES.values(), "data/manifest.json"


rule manifest:
    input: TABLES.values()
    output: "data/manifest.json"
    threads: 1
    shell: "{ROPE_HEADS} check-data --update"


for NAME, FOLDER in CHOSEN.items():  # rules of their own for each folder: a wildcard must not hold the commas of `fast,dropout=0.1`
    RUN = f"{RUNS}/" + ",".join([*FOLDER["recipe"], *sorted(FOLDER["set"])])
    OPTIONS = {key: " ".join(FOLDER[key]) for key in ("recipe", "tasks", "seeds", "keep", "weights")}

    rule:
        name: NAME
        localrule: True
        input: TABLES[NAME]

    # No input: neither a new torch nor an edited module throws weeks of training away. Everything but the weights is left to the command,
    # because Snakemake removes what a rule declares before it starts a job and after it fails, and the next attempt needs the checkpoint.
    rule:
        name: f"train_{NAME}"
        output: RUN + "/{task}-{seed}/model.safetensors"
        params: OPTIONS["recipe"], "".join(f" --set {change}" for change in FOLDER["set"]), OPTIONS["keep"]
        threads: 1
        resources: mem_mb=3000, runtime=720
        shell: "{ROPE_HEADS} train --task {wildcards.task} --recipe {params[0]} --seed {wildcards.seed}{params[1]} --measure --keep {params[2]} --runs {RUNS}"

    rule:
        name: f"measure_{NAME}"
        input: RUN + "/{task}-{seed}/model.safetensors"
        output: RUN + "/{task}-{seed}/mechanism.parquet"  # the last of its tables
        params: RUN
        threads: 1
        resources: mem_mb=3000, runtime=60
        shell: "{ROPE_HEADS} measure --run {params[0]}/{wildcards.task}-{wildcards.seed}"

    rule:
        name: f"collect_{NAME}"
        input: expand(RUN + "/{task}-{seed}/mechanism.parquet", task=FOLDER["tasks"], seed=FOLDER["seeds"])
        output: TABLES[NAME]
        params: RUN.removeprefix(f"{RUNS}/"), NAME, OPTIONS["tasks"], OPTIONS["seeds"], OPTIONS["weights"]
        threads: 1
        resources: mem_mb=3000, runtime=60
        shell: "{ROPE_HEADS} collect --recipe {params[0]} --into {params[1]} --tasks {params[2]} --seeds {params[3]} --weights {params[4]} --runs {RUNS}"
