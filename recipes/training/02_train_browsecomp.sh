#!/usr/bin/env bash
# Stage two of the release: BrowseComp SFT from the general run's late milestone, 302 global steps on 4 logical ranks.
#
#   GENERAL_CHECKPOINT  where it starts from [runs/general@general_step_176175]: a checkpoint, a run, RUN@NAME or a Hub id
#   DATA_FILE           the training rows, .jsonl or .jsonl.gz [the bundled, filtered file]
#   NPROC_PER_NODE      processes on this machine [4]; any number that divides run.ranks gives the same bytes
#   OUTPUT_DIR          directory of the run [runs/browsecomp]
#   MODEL_NAME, STEPS_PER_EPOCH, SAVE_EVERY_STEPS, ATTN_IMPLEMENTATION      read by the recipe when they are set
#   PYTHON              a Python that has this package [python3: that of the active environment]
#
# Further arguments are passed on, in our spelling or the reference's; a --parallel_kv_load_dir or --init among them
# takes the place of GENERAL_CHECKPOINT.
set -euo pipefail

python="${PYTHON:-python3}"
if ! "${python}" -c 'import typer, pscli' >/dev/null 2>&1; then
    echo "error: ${python} does not have this package: activate its environment (. .venv/bin/activate), or set PYTHON" \
        "(PYTHON=.venv/bin/python)" >&2
    exit 2
fi

start=(--init "${GENERAL_CHECKPOINT:-runs/general@general_step_176175}")
for argument in "$@"; do
    case "${argument}" in
    --init | --init=* | --parallel_kv_load_dir | --parallel_kv_load_dir=*) start=() ;;
    esac
done

exec "${python}" -m pscli.compat_train \
    --recipe browsecomp \
    --nproc "${NPROC_PER_NODE:-4}" \
    --out "${OUTPUT_DIR:-runs/browsecomp}" \
    ${start[@]+"${start[@]}"} \
    "$@"
