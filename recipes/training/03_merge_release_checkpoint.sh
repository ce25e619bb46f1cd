#!/usr/bin/env bash
# Stage three of the release: half the BrowseComp adapter, half the general run's at step 95,060, whose mapper is taken.
#
#   BROWSECOMP_CHECKPOINT      A [runs/browsecomp]: a checkpoint, a run, RUN@NAME or a Hub id
#   GENERAL_EARLY_CHECKPOINT   B, and the mapper's source [runs/general@general_step_95060]
#   OUTPUT_DIR                 where the merged checkpoint goes [runs/release]
#   PYTHON                     a Python that has this package [python3: that of the active environment]
#
# Further arguments are passed on to `ps merge` (--dry-run, --json, --weight-a 0.4 --weight-b 0.6 ...).
set -euo pipefail

python="${PYTHON:-python3}"
if ! "${python}" -c 'import typer, pscli' >/dev/null 2>&1; then
    echo "error: ${python} does not have this package: activate its environment (. .venv/bin/activate), or set PYTHON" \
        "(PYTHON=.venv/bin/python)" >&2
    exit 2
fi

exec "${python}" -m pscli merge \
    "${BROWSECOMP_CHECKPOINT:-runs/browsecomp}" \
    "${GENERAL_EARLY_CHECKPOINT:-runs/general@general_step_95060}" \
    --recipe release-merge \
    --out "${OUTPUT_DIR:-runs/release}" \
    "$@"
