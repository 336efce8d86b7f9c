"""Regenerates data/runs from nothing, one step of the command line a rule:

    snakemake -n data                                    what would be done
    snakemake -c2 data                                   all of it, two jobs at a time, one thread each
    snakemake -c2 fast                                   the tables of one folder of data/runs
    snakemake -c2 lengths                                long inputs: all runs measured, 27 more trained under interventions
    snakemake -c2 toys                                   the toy models of induction
    snakemake -c2 audit                                  tasks, recipes and shapes that the papers lack
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
              "weights": "number-0,number-1,number-2,letter-0,letter-1,letter-2"},
    "fast": {"recipe": "fast", "set": "", "tasks": "number,letter", "seeds": "0-4", "keep": "0,250,500,750,1000,1500", "weights": ""},
}
# Long inputs: what `rope-heads lengths` measures of each run, seeds 0 to 2 also under changes at test time; and the interventions in training.
LENGTHS = {"paper": "main readings kinds crowds sharper", "fast": "main crowds sharper windowed"}
CHANGED_AT_TEST = {"paper": " changes controls", "fast": " changes"}
INTERVENTIONS = {"nope_from=4": "number,letter", "planes=fastest": "number,letter", "planes=slowest": "number,letter",
                 "long_share=0.05": "number,letter", "index_layers=4": "number"}
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
localrules: data, manifest, lengths

LONG = [f"data/runs/{name}/lengths.parquet" for name in ("lengths", "interventions")]
ALL = [*TABLES.values(), *(LONG if list(CHOSEN) == list(FOLDERS) else [])]  # chosen runs alone have no tables of long inputs


rule data:
    input: ALL, "data/manifest.json"


rule manifest:
    input: ALL
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


# ---- long inputs ----------------------------------------------------------------------------------------------------------------------


def measured(recipes: dict[str, str], seeds) -> list[str]:
    """The marks of runs that are measured on long inputs, for recipes and their tasks."""
    return [f"{RUNS}/{recipe}/{task}-{seed}/lengths.done" for recipe, tasks in recipes.items() for task in listed(tasks)
            for seed in (seeds or listed(FOLDERS[recipe]["seeds"]))]  # fmt: skip


UNTOUCHED = {name: folder["tasks"] for name, folder in FOLDERS.items()}
CHANGED = {f"fast,{change}": tasks for change, tasks in INTERVENTIONS.items()}


rule lengths:
    input: LONG
    shell: "{ROPE_HEADS} check-data --update"

rule train_intervention:
    output: RUNS + "/{recipe}/{task}-{seed}/model.safetensors"
    wildcard_constraints: recipe="fast,[a-z_]+=[a-z0-9.]+"
    params: lambda wildcards: wildcards.recipe.partition(",")[2]
    threads: 1
    resources: mem_mb=3000, runtime=720
    shell: "{ROPE_HEADS} train --task {wildcards.task} --recipe fast --seed {wildcards.seed} --set {params[0]} --runs {RUNS}"

# a mark instead of the tables: Snakemake would remove these before an interrupted measurement goes on
rule lengths_of_a_run:
    input: RUNS + "/{recipe}/{task}-{seed}/model.safetensors"
    output: touch(RUNS + "/{recipe}/{task}-{seed}/lengths.done")
    params: lambda wildcards: "short" if "," in wildcards.recipe else LENGTHS[wildcards.recipe] + CHANGED_AT_TEST[wildcards.recipe] * (int(wildcards.seed) < 3)
    threads: 1
    resources: mem_mb=3000, runtime=240
    shell: "{ROPE_HEADS} lengths --run {RUNS}/{wildcards.recipe}/{wildcards.task}-{wildcards.seed} --what {params[0]}"

rule collect_lengths:
    input: measured(UNTOUCHED, None)
    output: "data/runs/lengths/lengths.parquet", "data/runs/lengths/gaps.parquet"
    params: recipes=list(UNTOUCHED), seeds=listed("0-7"), tasks=sorted({task for tasks in UNTOUCHED.values() for task in listed(tasks)})  # the audit's tasks lie beside them
    threads: 1
    shell: "{ROPE_HEADS} collect --recipe {params.recipes} --into lengths --only lengths gaps --tasks {params.tasks} --seeds {params.seeds} --runs {RUNS}"

rule collect_interventions:
    input: measured(CHANGED, listed("0-2"))
    output: "data/runs/interventions/lengths.parquet", "data/runs/interventions/accuracy.parquet"
    params: recipes=list(CHANGED), seeds=listed("0-2")
    threads: 1
    shell: "{ROPE_HEADS} collect --recipe {params.recipes} --into interventions --only lengths accuracy --seeds {params.seeds} --runs {RUNS}"


# ---- audit: what else could explain the papers' results ---------------------------------------------------------------------------------

# folder of data/runs: recipes and tasks, seeds, tables. At most 60 models.
AUDIT = {
    "letter_12": ({"fast": "letter_12,letter_12_debiased"}, "0-4", "accuracy audit lengths"),  # with the counting shortcut and without
    "number_64": ({"fast": "number_64"}, "0-4", "accuracy heads lengths"),  # as many answers as Letter has
    "variants": ({name: "number,letter" for name in ("paper,lr=0.001", "fast,dropout=0.1", "fast,heads=4,layers=2", "fast,heads=2,layers=4", "fast,layers=6")},
                 "0-2", "accuracy heads"),
    "two_layers_letter_12": ({"fast,heads=4,layers=2": "letter_12,letter_12_debiased"}, "0-4", "accuracy audit"),  # hops that can be counted, and not
    "two_layers_number": ({"fast,steps=8000,heads=4,layers=2": "number"}, "0-2", "accuracy heads"),  # more of the training that was not enough
}
AUDIT_TASKS = "letter_12|letter_12_debiased|number_64"
AUDITED = [f"data/runs/{name}/{table}.parquet" for name, (_, _, tables) in AUDIT.items() for table in tables.split()]


def audited(recipes: dict[str, str], seeds: str, file: str) -> list[str]:
    return [f"{RUNS}/{recipe}/{task}-{seed}/{file}" for recipe, tasks in recipes.items() for task in listed(tasks) for seed in listed(seeds)]


rule audit:
    input: AUDITED
    shell: "{ROPE_HEADS} check-data --update"

ruleorder: train_variant > train_intervention

rule train_variant:
    output: RUNS + "/{recipe}/{task}-{seed}/model.safetensors"
    wildcard_constraints: recipe="|".join(recipe for recipes, _, _ in AUDIT.values() for recipe in recipes if recipe != "fast"), task="[a-z0-9_]+"
    params: lambda wildcards: wildcards.recipe.split(",")[0], lambda wildcards: "".join(f" --set {change}" for change in wildcards.recipe.split(",")[1:])
    threads: 1
    resources: mem_mb=3000, runtime=720
    shell: "{ROPE_HEADS} train --task {wildcards.task} --recipe {params[0]} --seed {wildcards.seed}{params[1]} --measure --runs {RUNS}"

rule train_audit_task:
    output: RUNS + "/fast/{task}-{seed}/model.safetensors"
    wildcard_constraints: task=AUDIT_TASKS
    threads: 1
    resources: mem_mb=3000, runtime=720
    shell: "{ROPE_HEADS} train --task {wildcards.task} --recipe fast --seed {wildcards.seed} --measure --runs {RUNS}"

rule lengths_of_an_audit_task:
    input: RUNS + "/fast/{task}-{seed}/model.safetensors"
    output: touch(RUNS + "/fast/{task}-{seed}/lengths.done")
    wildcard_constraints: task=AUDIT_TASKS
    threads: 1
    resources: mem_mb=3000, runtime=240
    shell: "{ROPE_HEADS} lengths --run {RUNS}/fast/{wildcards.task}-{wildcards.seed} --what main readings"

for NAME, (RECIPES_OF, SEEDS, KEPT) in AUDIT.items():

    rule:
        name: f"collect_{NAME}"
        input: audited(RECIPES_OF, SEEDS, "lengths.done" if "lengths" in KEPT else "model.safetensors")
        output: [f"data/runs/{NAME}/{table}.parquet" for table in KEPT.split()]
        params: list(RECIPES_OF), NAME, KEPT, sorted({task for tasks in RECIPES_OF.values() for task in listed(tasks)}), listed(SEEDS)
        threads: 1
        shell: "{ROPE_HEADS} collect --recipe {params[0]} --into {params[1]} --only {params[2]} --tasks {params[3]} --seeds {params[4]} --runs {RUNS}"


# Toy models of induction. Arms and how many seeds each has, as in rope_heads.induction.ARMS.
TOYS = {"learned-free": 8, "learned-symmetric": 8, "RoPE-free": 8, "RoPE-symmetric": 8, "RoPE-phase-suppressed": 8, "learned-sham": 5, "RoPE-tied": 5,
        "RoPE-sham": 5, "learned-tied": 5, "ALiBi-free": 5, "ALiBi-symmetric": 5, "no-positions-free": 5, "no-positions-symmetric": 5}


# Two runs of each arm of P2's go on to the end of P2's training, for the losses that it prints.
CONTINUED, CONTINUED_ARMS, CONTINUED_SEEDS = "toys,after=None,cap=6000", list(TOYS)[:5], range(2)


rule toys:
    input: "data/runs/toys/formation.parquet", "data/runs/toys_continued/formation.parquet"
    shell: "{ROPE_HEADS} check-data --update"

rule train_toy:
    output: RUNS + "/toys/{arm}-{seed}/run.json"
    wildcard_constraints: arm="[A-Za-z-]+"
    params: lambda wildcards: wildcards.arm.replace("-", " ")
    threads: 1
    resources: mem_mb=3000, runtime=720
    shell: '{ROPE_HEADS} toy --arm "{params[0]}" --seed {wildcards.seed} --runs {RUNS}'

rule continue_toy:
    output: f"{RUNS}/{CONTINUED}/{{arm}}-{{seed}}/run.json"
    wildcard_constraints: arm="[A-Za-z-]+"
    params: lambda wildcards: wildcards.arm.replace("-", " ")
    threads: 1
    resources: mem_mb=3000, runtime=720
    shell: '{ROPE_HEADS} toy --arm "{params[0]}" --seed {wildcards.seed} --set after=None --set cap=6000 --runs {RUNS}'

rule collect_continued_toys:
    input: [f"{RUNS}/{CONTINUED}/{arm}-{seed}/run.json" for arm in CONTINUED_ARMS for seed in CONTINUED_SEEDS]
    output: "data/runs/toys_continued/formation.parquet", "data/runs/toys_continued/log.parquet", "data/runs/toys_continued/heads.parquet"
    threads: 1
    shell: "{ROPE_HEADS} toy --collect --set after=None --set cap=6000 --into toys_continued --runs {RUNS}"

rule collect_toys:
    input: [f"{RUNS}/toys/{arm}-{seed}/run.json" for arm, seeds in TOYS.items() for seed in (listed(config.get("seeds")) or range(seeds))]
    output: "data/runs/toys/formation.parquet", "data/runs/toys/log.parquet", "data/runs/toys/heads.parquet"
    threads: 1
    shell: "{ROPE_HEADS} toy --collect --runs {RUNS}"
