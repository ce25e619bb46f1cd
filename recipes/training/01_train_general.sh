#!/usr/bin/env bash
# Stage one of the release: the general mix, 220,220 global steps on 4 logical ranks (recipes/general.toml).
#
#   NPROC_PER_NODE      processes on this machine [4]; any number that divides run.ranks gives the same bytes
#   OUTPUT_DIR          directory of the run [runs/general]
#   MODEL_NAME, STEPS_PER_EPOCH, SAVE_EVERY_STEPS, ATTN_IMPLEMENTATION      read by the recipe when they are set
#
# Further arguments are passed on, in our spelling (--set optim.learning_rate=3e-4, --dry-run) or the reference's
# (--parallel_kv_load_dir CKPT --resume_from_global_step 95060).
set -euo pipefail

exec "${PYTHON:-python3}" -m pscli.compat_train \
    --recipe general \
    --nproc "${NPROC_PER_NODE:-4}" \
    --out "${OUTPUT_DIR:-runs/general}" \
    "$@"
