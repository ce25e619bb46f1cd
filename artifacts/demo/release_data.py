"""Tiny data files for the release's three stages, under the names that the recipes look for (make release-demo).

    python artifacts/demo/release_data.py DIR

Eight .jsonl files for the general mix and the BrowseComp .jsonl.gz, with rows of the demo's world (make.py) from a
seed: the same bytes on every machine. Needs nothing but Python.
"""

import argparse
import gzip
import json
import random
from pathlib import Path

from make import SEED, TASKS, make_row

# Rows a task, roughly in the proportions of the release's 206,788 to 1,171; the order is that of the recipe.
GENERAL = {
    "data/wildchat/processed/train_all_lang_multi_turn_min3.jsonl": 42,
    "data/ultrachat/processed/train_sft_multi_turn_min3.jsonl": 28,
    "data/lmsys-chat/processed/train_all_lang_multi_turn_min3.jsonl": 35,
    "data/toucan/processed/train_single_turn_parallel_tool_call_unified.jsonl": 28,
    "data/toucan/processed/train_multi_turn_parallel_tool_call.jsonl": 4,
    "data/dta-tool/processed/train_parallel_function_calls.jsonl": 8,
    "data/flan/processed/train_in_context_examples.jsonl": 12,
    "data/2wiki-multihopqa/processed/train.jsonl": 33,
}
BROWSECOMP = {"data/browsecomp-textmas/processed/filtered_train.jsonl.gz": 48}


def make_files(directory):
    """Writes all nine files below a directory; returns [(path, rows, bytes)]."""
    made = []
    for at, (name, rows) in enumerate((GENERAL | BROWSECOMP).items()):
        rng = random.Random(f"{SEED} release {name}")  # a text seeds alike on every machine
        task = TASKS[at % len(TASKS)]
        lines = [json.dumps(make_row(rng, task, False, number)) + "\n" for number in range(rows)]
        content = "".join(lines).encode()
        if name.endswith(".gz"):
            content = gzip.compress(content, mtime=0)  # the time would be in the bytes
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        made.append((name, rows, len(content)))
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    for name, rows, size in make_files(parser.parse_args().directory):
        print(f"{rows:4} rows {size:7,} bytes  {name}")


if __name__ == "__main__":
    main()
