#!/usr/bin/env bash
# Stage three of the release: half the BrowseComp adapter, half the general run's at step 95,060, whose mapper is taken.
#
#   BROWSECOMP_CHECKPOINT      A [runs/browsecomp]: a checkpoint, a run, RUN@NAME or a Hub id
#   GENERAL_EARLY_CHECKPOINT   B, and the mapper's source [runs/general@general_step_95060]
#   OUTPUT_DIR                 where the merged checkpoint goes [runs/release]
#
# Further arguments are passed on to `ps merge` (--dry-run, --json, --set ...).
set -euo pipefail

exec "${PYTHON:-python3}" -m pscli merge \
    "${BROWSECOMP_CHECKPOINT:-runs/browsecomp}" \
    "${GENERAL_EARLY_CHECKPOINT:-runs/general@general_step_95060}" \
    --recipe release-merge \
    --out "${OUTPUT_DIR:-runs/release}" \
    "$@"
