#!/usr/bin/env bash
# The release's training sequence from end to end on a laptop, in half a minute: the same recipes and launchers as for
# Qwen3-14B, with the demo's backbone and a handful of rows a task in place of the real ones.
#
#   artifacts/demo/release.sh [DIR]     DIR: where everything goes [runs/release-demo]; what an earlier release demo
#                                       left in it is removed first
#   PYTHON            a Python that has the package [python3]
#   NPROC_PER_NODE    processes of a stage [1]; 1, 2 and 4 give the same bytes
set -euo pipefail

directory="${1:-runs/release-demo}"
demo="$(cd "$(dirname "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)"
python="${PYTHON:-python3}"
if ! PYTHON="$(command -v "${python}")" || ! "${PYTHON}" -P -c 'import typer, pscli' >/dev/null 2>&1; then
    echo "error: ${python} does not have this package: activate its environment (. .venv/bin/activate), or set PYTHON" \
        "(PYTHON=.venv/bin/python)" >&2
    exit 2
fi
case "${PYTHON}" in /*) ;; *) PYTHON="${PWD}/${PYTHON}" ;; esac

# The recipes look for their data under the current directory, so the demo works in one of its own.
mark=".release-demo"
if [[ -n "$(ls -A "${directory}" 2>/dev/null)" && ! -e "${directory}/${mark}" ]]; then
    echo "error: ${directory} holds something else; give a new or an empty directory" >&2
    exit 2
fi
mkdir -p "${directory}"
cd "${directory}"
touch "${mark}"
rm -rf data runs

title() { printf '\n== %s\n' "$*"; }
ps() { "${PYTHON}" -m pscli "$@"; }
show() { # [VARIABLE=VALUE ...] COMMAND ...: prints a command as it would be typed, and runs it
    printf '$ %s\n' "$*"
    while [[ "$1" == *=* ]]; do
        local -x "$1"
        shift
    done
    "$@" </dev/null &
    wait "$!"
}
# bash would act on a signal only when the stage has come to its own end. A stage is a job with a process group of its
# own (set -m); training saves and ends, and only then may this be called again.
stop() {
    trap - HUP INT TERM
    kill -s TERM -- "-$!" 2>/dev/null || true
    while kill -0 -- "-$!" 2>/dev/null; do sleep 0.1; done
    exit "$1"
}
trap 'stop 129' HUP
trap 'stop 130' INT
trap 'stop 143' TERM
set -m

# All that tiny scale needs, besides its steps: the release trains Qwen/Qwen3-14B, which the recipes name.
export PARALLEL_SYNTHESIS_CACHE="${PARALLEL_SYNTHESIS_CACHE:-${PWD}/cache}"
export PYTHON NPROC_PER_NODE="${NPROC_PER_NODE:-1}" MODEL_NAME=package:artifacts/demo/backbone
beside="$(dirname "${PYTHON}")" launchers="$(cd "${demo}/../../recipes/training" && pwd)"

printf 'What is typed below runs in this directory, with these settings:\n'
quoted() { printf '%q' "$1"; }
printf '  cd %s\n' "$(quoted "${PWD}")"
# shellcheck disable=SC2016 # the $PATH and "$@" are for the reader's shell
{
    printf '  export PATH=%s:%s:"$PATH"\n' "$(quoted "${launchers}")" "$(quoted "${beside}")"
    if ! grep -qs pscli "${beside}/ps"; then # not installed as a script
        printf '  ps() { %s -m pscli "$@"; }\n' "$(quoted "${PYTHON}")"
    fi
}
for name in PYTHON NPROC_PER_NODE MODEL_NAME PARALLEL_SYNTHESIS_CACHE; do
    printf '  export %s=%s\n' "${name}" "$(quoted "${!name}")"
done
printf 'A stage writes into a new directory: typed again, it takes OUTPUT_DIR=runs/another in front.\n'
PATH="${launchers}:${PATH}"
early=19 late=35

title "Data: eight tasks and BrowseComp, some rows from a seed (so each file will be called not the release's)"
show "${PYTHON}" "${demo}/release_data.py" .

title "Stage 1: the general mix. Steps ${early} and ${late} play the parts of the release's 95,060 and 176,175"
show 01_train_general.sh --set "checkpoint.milestones=[${early},${late}]"

title "Stage 2: BrowseComp, from the late milestone. A low limit has the guards skip a part of the steps, as they did there"
show "GENERAL_CHECKPOINT=runs/general@general_step_${late}" 02_train_browsecomp.sh --set guards.prefill_tokens=130

title "Stage 3: half of BrowseComp's adapter and half of the early milestone's, with the latter's cache mapper"
show "GENERAL_EARLY_CHECKPOINT=runs/general@general_step_${early}" 03_merge_release_checkpoint.sh

title "Proof: every byte of both runs and of the merged checkpoint, and where it all comes from"
show ps verify runs/general
show ps verify runs/browsecomp
show ps verify runs/release
show ps inspect runs/release --lineage

printf '\nAll of it is in %s; the same command again gives the same bytes.\n' "${directory}"
