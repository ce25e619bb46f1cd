#!/usr/bin/env bash
# Stage one of the release: the general mix, 220,220 global steps on 4 logical ranks (recipes/general.toml).
#
#   NPROC_PER_NODE      processes on this machine [4]; any number that divides run.ranks gives the same bytes
#   OUTPUT_DIR          directory of the run [runs/general]
#   MODEL_NAME, STEPS_PER_EPOCH, SAVE_EVERY_STEPS, ATTN_IMPLEMENTATION      read by the recipe when they are set
#   PYTHON              a Python that has this package [python3: that of the active environment]
#
# Further arguments are passed on, in our spelling (--set optim.learning_rate=3e-4, --dry-run) or the reference's
# (--parallel_kv_load_dir CKPT --resume_from_global_step 95060).
set -euo pipefail

python="${PYTHON:-python3}"
if ! "${python}" -c 'import typer, pscli' >/dev/null 2>&1; then
    echo "error: ${python} does not have this package: activate its environment (. .venv/bin/activate), or set PYTHON" \
        "(PYTHON=.venv/bin/python)" >&2
    exit 2
fi

exec "${python}" -m pscli.compat_train \
    --recipe general \
    --nproc "${NPROC_PER_NODE:-4}" \
    --out "${OUTPUT_DIR:-runs/general}" \
    "$@"
