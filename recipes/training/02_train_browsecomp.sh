#!/usr/bin/env bash
# Stage two of the release: BrowseComp SFT from the general run's late milestone, 302 global steps on 4 logical ranks.
#
#   GENERAL_CHECKPOINT  where it starts from [runs/general@general_step_176175]: a checkpoint, a run, RUN@NAME or a Hub id
#   DATA_FILE           the training rows, .jsonl or .jsonl.gz [the bundled, filtered file]
#   NPROC_PER_NODE      processes on this machine [4]; any number that divides run.ranks gives the same bytes
#   OUTPUT_DIR          directory of the run [runs/browsecomp]
#   MODEL_NAME, STEPS_PER_EPOCH, SAVE_EVERY_STEPS, ATTN_IMPLEMENTATION      read by the recipe when they are set
#
# Further arguments are passed on, in our spelling or the reference's; a --parallel_kv_load_dir or --init among them
# takes the place of GENERAL_CHECKPOINT.
set -euo pipefail

start=(--init "${GENERAL_CHECKPOINT:-runs/general@general_step_176175}")
for argument in "$@"; do
    case "${argument}" in
    --init | --init=* | --parallel_kv_load_dir | --parallel_kv_load_dir=*) start=() ;;
    esac
done

exec "${PYTHON:-python3}" -m pscli.compat_train \
    --recipe browsecomp \
    --nproc "${NPROC_PER_NODE:-4}" \
    --out "${OUTPUT_DIR:-runs/browsecomp}" \
    ${start[@]+"${start[@]}"} \
    "$@"
