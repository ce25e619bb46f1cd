#!/usr/bin/env python3
"""Make the built-in demo: data files, tokenizer, a small pretrained backbone and their manifest.

    python artifacts/demo/make.py data | tokenizer | backbone | all

Everything is generated from SEED and nothing is downloaded. `data` needs the standard library only, `tokenizer` the
`tokenizers` package, `backbone` torch and transformers (5.x) and some minutes on two cores. Each command rewrites
manifest.json for the files that are there. The result is committed, so users need none of this.

The demo's world: people have food, visit cities and help each other. A few short reports (the branches) state such
facts, and every question needs two facts that stand in different reports.

Why a small backbone can learn it: it is pretrained as an ordinary causal LM on plain text (reports, then "Question:"
and "Answer:" lines, all in one sequence), which teaches it to find facts in its context. It has never seen the chat
format, nor reports that were encoded apart from each other at overlapping positions; that is left to the trainer.
"""

import argparse
import hashlib
import json
import math
import random
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
DATA, BACKBONE, MANIFEST = HERE / "data", HERE / "backbone", HERE / "manifest.json"

SEED = 20260614
TRAIN_ROWS, HELDOUT_ROWS = 480, 64  # per task
STEPS, BATCH, PEAK_LR, WARMUP = 3000, 16, 4e-3, 100  # pretraining
INIT_STD, ROPE_THETA = 0.08, 100.0
LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM = 3, 128, 256, 4, 2, 32
VOCAB_LIMIT, MAX_POSITIONS, THREADS = 1024, 1024, 1

NAMES = """Ann Bob Carl Dana Eva Finn Gina Hugo Ida Jack Kate Leo Mia Nick Olga Paul
Rosa Sam Tina Vera Will Zoe Adam Beth Clara Dean Emma Fred Grace Hans Iris John""".split()
FOODS = """figs plums pears apples grapes lemons limes dates nuts beans peas carrots onions leeks beets olives
melons cherries peaches tomatoes radishes mangos turnips berries""".split()
CITIES = """Rome Oslo Paris London Berlin Madrid Vienna Prague Lisbon Dublin Athens Warsaw Cairo Delhi Tokyo Lima
Boston Denver Miami Tunis Milan Naples Seoul Perth""".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
CHORES = ["opens the archive", "reads page after page", "looks for people", "makes a list", "checks the list"]

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


# ---- the world -------------------------------------------------------------------------------------------------------


class World:
    """Some people, and for each of them what they have, which city they visit and whom they help (never themselves)."""

    def __init__(self, rng, people):
        self.people = rng.sample(NAMES, people)
        self.has = {p: rng.choice(FOODS) for p in self.people}
        self.city = {p: rng.choice(CITIES) for p in self.people}
        self.helps = {p: rng.choice([q for q in self.people if q != p]) for p in self.people}

    def fact(self, kind, p):
        value = {
            "has": f"has {self.has[p]}",
            "city": f"visits {self.city[p]}",
            "helps": f"helps {self.helps[p]}",
        }
        return f"{p} {value[kind]}"


def ask(world, task, a, b):
    """Question and answer of a task about a and b. The answer states both facts in the words of the reports, so that
    every one of its words is found by one look-up; b of a hop is a's helped person and is not named in the question."""
    if task == "demo_pair":
        return f"What do {a} and {b} have?", f"{world.fact('has', a)} and {world.fact('has', b)}."
    if task == "demo_hop":
        return f"What has the one helped by {a}?", f"{world.fact('helps', a)} and {world.fact('has', b)}."
    verdict = "yes" if world.city[a] == world.city[b] else "no"
    answer = f"{world.fact('city', a)} and {world.fact('city', b)}, so {verdict}."
    return f"Do {a} and {b} visit the same city?", answer


NEEDED = {"demo_pair": ("has", "has"), "demo_hop": ("helps", "has"), "demo_same": ("city", "city")}
TASKS = tuple(NEEDED)


def report(rng, facts):
    return f"Report of {rng.choice(DAYS)}: " + " ".join(f"{fact}." for fact in facts)


# ---- data ------------------------------------------------------------------------------------------------------------


def is_heldout(task, a, b, food):
    """The split, by combinations: a held-out row never asks for a combination that a training row asks for.

    pair and same: the two people asked about. hop: the chain of person, helped person and food."""
    total = NAMES.index(a) + NAMES.index(b) + (FOODS.index(food) if task == "demo_hop" else 0)
    return total % 4 == 0


def make_row(rng, task, heldout, number):
    while True:
        world = World(rng, people=rng.randint(4, 6))
        a, b = world.people[:2]
        if task == "demo_hop":
            world.helps[a] = b
        if task == "demo_same":
            # Exactly half of the rows are "yes"; the other half has two different cities.
            other = [city for city in CITIES if city != world.city[a]]
            world.city[b] = world.city[a] if number % 2 == 0 else rng.choice(other)
        if is_heldout(task, a, b, world.has[b]) == heldout:
            break
    # The two facts asked for go into different branches; the others fill up all branches.
    first, second = NEEDED[task]
    wanted = [(first, a), (second, b)]
    others = [(kind, p) for kind in ("has", "city", "helps") for p in world.people if (kind, p) not in wanted]
    rng.shuffle(others)
    count = rng.choice((2, 2, 3, 3, 4, 5))
    branches = [[others.pop() for _ in range(rng.randint(1, 2))] for _ in range(count)]
    for fact, at in zip(wanted, rng.sample(range(count), 2), strict=True):
        branches[at].insert(rng.randint(0, len(branches[at])), fact)
    texts = [report(rng, [world.fact(*fact) for fact in facts]) for facts in branches]
    question, answer = ask(world, task, a, b)
    row = {
        "id": f"{task}-{'heldout' if heldout else 'train'}-{number:04d}",
        "question": question,
        "query": question,
        "gold": answer,
        "references": [f"{world.fact(*fact)}." for fact in wanted],
        "agent_reference_contexts": texts,
    }
    if task == "demo_pair" and number % 2 == 1:
        # As in a tool history: all branches share what went before, and only their own end is kept.
        prefix = (
            "The helper " + ", ".join(rng.sample(CHORES, 3)) + f" and writes a report on {rng.choice(DAYS)}."
        )
        row["agent_extract_contexts"] = texts
        row["agent_reference_contexts"] = [f"{prefix} {text}" for text in texts]
    return row


def make_data():
    DATA.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        for split, rows in (("train", TRAIN_ROWS), ("heldout", HELDOUT_ROWS)):
            rng = random.Random(
                f"{SEED} {task} {split}"
            )  # a text seed is hashed the same way on every machine
            lines = [
                json.dumps(make_row(rng, task, split == "heldout", number)) + "\n" for number in range(rows)
            ]
            (DATA / f"{task}.{split}.jsonl").write_bytes("".join(lines).encode())


def branch_blind_nats(task):
    """Entropy of a held-out answer given its query alone, in nats.

    The generator draws what the query does not give uniformly from a set whose size is known here; so the entropy is
    exact, and by Gibbs' inequality no reader of the query alone, whatever it knows about the generator and the split,
    has a lower expected cross-entropy. All other tokens of the answer follow from the query and those words.
    pair: two foods, independent. hop: (person, food) such that the chain is a held-out one, person differs from a.
    same: "yes" or "no" with probability 1/2 each; one city, or two that differ."""
    if task == "demo_pair":
        return 2 * math.log(len(FOODS))
    if task == "demo_hop":
        # The split by triples leaves the same number of (person, food) pairs, up to one person's share, for every a.
        counts = [sum(is_heldout(task, a, b, food) for b in NAMES if b != a for food in FOODS) for a in NAMES]
        return math.log(min(counts))
    return math.log(2) + math.log(len(CITIES)) + 0.5 * math.log(len(CITIES) - 1)


# ---- tokenizer -------------------------------------------------------------------------------------------------------


def make_tokenizer():
    """Byte-level BPE: every word of the demo is one token, with and without a blank before it; any text encodes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    words = NAMES + FOODS + CITIES + DAYS
    sentences = [
        "You are a helpful assistant.", "system\nuser\nassistant\n", "Question: Answer: Report of yes no, so",
        "What do they have? What has the one helped by them? Do they visit the same city? ",
        "has visits helps and", "The helper writes a report on", *CHORES,
    ]  # fmt: skip
    corpus = (
        [text for word in words for text in (word, f" {word}")] + sentences + [f" {s}" for s in sentences]
    )
    corpus += [f" {word}" for sentence in sentences for word in sentence.split()]
    tokenizer = Tokenizer(models.BPE())
    # The pre-tokenizer of Qwen: line ends join up, so that "assistant\n" + "\n" is tokenised as in its chat format.
    pattern = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_LIMIT,
        min_frequency=1,
        show_progress=False,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator((corpus + ["a\n\nb"] * 2) * 2, trainer)
    BACKBONE.mkdir(parents=True, exist_ok=True)
    write_json(BACKBONE / "tokenizer.json", json.loads(tokenizer.to_str()))
    # Written by hand, because each library generation writes names that the other one does not know.
    write_json(
        BACKBONE / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "additional_special_tokens": [TURN_START, TURN_END],
            "model_max_length": MAX_POSITIONS,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    for word in words:
        for text in (word, f" {word}"):
            assert len(tokenizer.encode(text).ids) == 1, f"{text!r} is not one token: raise VOCAB_LIMIT"
    return tokenizer


# ---- backbone --------------------------------------------------------------------------------------------------------


def pretraining_text(rng, ease):
    """One training sequence in two parts: some reports; a report that states their facts again, then questions.

    The restatement teaches looking up most cheaply: one fact to find for every four or five tokens of text. ease goes
    from 1 (few facts) to 0 (as many as in the data)."""
    world = World(rng, people=3 if ease > 0.4 else rng.randint(3, 6))
    kinds = rng.sample(("has", "city", "helps"), rng.randint(1, 3))
    facts = [(kind, p) for kind in kinds for p in world.people]
    rng.shuffle(facts)
    facts = facts[: 5 if ease > 0.4 else rng.randint(5, 12)]
    if rng.random() < 0.5:
        world.city[world.people[1]] = world.city[world.people[0]]
    lines, left = [], list(facts)
    while left:
        size = rng.randint(1, 5)
        lines.append(report(rng, [world.fact(*fact) for fact in left[:size]]))
        left = left[size:]
    # Half of the time in the same order: copying is the easiest look-up, and the others grow out of it.
    again = [world.fact(*fact) for fact in (facts if rng.random() < 0.5 else rng.sample(facts, len(facts)))]
    if ease > 0.4:
        again += [world.fact(*fact) for fact in rng.sample(facts, len(facts))]
    asked = []
    for a in world.people:
        asked += [(t, a, b) for t in ("demo_pair", "demo_same") for b in world.people if b != a]
        asked += [("demo_hop", a, world.helps[a])] * 3
    asked = [(t, a, b) for t, a, b in asked if (NEEDED[t][0], a) in facts and (NEEDED[t][1], b) in facts]
    rng.shuffle(asked)
    rest = [report(rng, again)]
    for task, a, b in asked[: rng.randint(1, 3)]:
        question, answer = ask(world, task, a, b)
        rest.append(f"Question: {question}\nAnswer: {answer}")
    return "\n".join(lines), "\n" + "\n".join(rest) + "\n" + END_OF_TEXT


def make_backbone():
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    eos = tokenizer.token_to_id(END_OF_TEXT)
    settings = {
        "vocab_size": tokenizer.get_vocab_size(), "hidden_size": HIDDEN, "intermediate_size": MLP,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": ROPE_THETA,
        "max_position_embeddings": MAX_POSITIONS, "attention_bias": False, "attention_dropout": 0.0,
        "tie_word_embeddings": True, "use_sliding_window": False, "initializer_range": INIT_STD,
        "bos_token_id": None, "eos_token_id": eos, "pad_token_id": eos,
    }  # fmt: skip
    model = Qwen3ForCausalLM(Qwen3Config(**settings, attn_implementation="sdpa"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    rng = random.Random(f"{SEED} pretraining")
    started, recent = time.perf_counter(), []
    for step in range(STEPS):
        ramp = min(1.0, (step + 1) / WARMUP)
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * ramp * cosine
        texts = [pretraining_text(rng, ease=1 - step / STEPS) for _ in range(BATCH)]
        first, rest = ([e.ids for e in tokenizer.encode_batch(part)] for part in zip(*texts, strict=True))
        rows = list(zip(first, rest, strict=True))
        width = max(len(x) + len(y) for x, y in rows)
        # Facts are random when they are first stated: a loss on them would only add noise, so it begins after them.
        # Right padding is harmless under a causal mask when the padded targets do not count.
        ids = torch.tensor([x + y + [eos] * (width - len(x) - len(y)) for x, y in rows])
        labels = torch.tensor([[-100] * len(x) + y + [-100] * (width - len(x) - len(y)) for x, y in rows])
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent = [*recent, loss.item()][-100:]
        if (step + 1) % 100 == 0:
            passed = time.perf_counter() - started
            print(
                f"step {step + 1}/{STEPS} loss {sum(recent) / len(recent):.4f} {passed:.0f} s",
                file=sys.stderr,
            )
    # The output layer is the embedding (tied), so it is stored once.
    weights = {
        name: w.detach().contiguous() for name, w in model.state_dict().items() if name != "lm_head.weight"
    }
    save_file(weights, BACKBONE / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **settings, "dtype": "float32"}
    write_json(BACKBONE / "config.json", config)
    write_json(
        BACKBONE / "generation_config.json", {"eos_token_id": eos, "pad_token_id": eos, "do_sample": False}
    )
    return {
        "command": "python artifacts/demo/make.py backbone", "steps": STEPS, "batch": BATCH, "peak_lr": PEAK_LR,
        "threads": THREADS, "parameters": sum(w.numel() for w in weights.values()),
        "final_loss": round(sum(recent) / len(recent), 4), "seconds": round(time.perf_counter() - started),
    }  # fmt: skip


# ---- manifest --------------------------------------------------------------------------------------------------------


def write_json(path, value):
    path.write_bytes((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def versions():
    from importlib.metadata import version

    names = ("torch", "transformers", "tokenizers", "safetensors")
    return {"python": sys.version.split()[0], **{name: version(name) for name in names}}


def branch_blind_floor():
    """The floor in nats per target token, over the held-out rows, each task and all tasks together (token-weighted)."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(BACKBONE / "tokenizer.json"))
    prompt = f"{TURN_START}assistant\n"
    tokens, nats = {}, {}
    for task in TASKS:
        rows = [json.loads(line) for line in (DATA / f"{task}.heldout.jsonl").read_text().splitlines()]
        # Target tokens are those after the prompt's own count: the "\n" that joins the prompt's last token is none.
        before = len(tokenizer.encode(prompt).ids)
        tokens[task] = sum(
            len(tokenizer.encode(f"{prompt}\n{r['gold']}{END_OF_TEXT}").ids) - before for r in rows
        )
        nats[task] = len(rows) * branch_blind_nats(task)
    by_task = {task: {
        "nats_per_answer": round(branch_blind_nats(task), 6), "nats_per_token": round(nats[task] / tokens[task], 6),
        "heldout_target_tokens": tokens[task], "derivation": DERIVATION[task],
    } for task in TASKS}  # fmt: skip
    return sum(nats.values()) / sum(tokens.values()), by_task


DERIVATION = {
    "demo_pair": f"two independent uniform foods: 2 ln {len(FOODS)}",
    "demo_hop": "ln of the number of equally likely held-out (helped person, food) answers, the smallest over the asked",
    "demo_same": f"ln 2 for yes or no, ln {len(CITIES)} for a city, and ln {len(CITIES) - 1} for another one in half",
}


def make_manifest(pretraining):
    floor, by_task = branch_blind_floor()
    if pretraining is None and MANIFEST.exists():
        pretraining = json.loads(MANIFEST.read_text()).get("pretraining")
    files = {}
    for path in sorted([*DATA.iterdir(), *BACKBONE.iterdir()]):
        content = path.read_bytes()
        files[path.relative_to(HERE).as_posix()] = {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    write_json(
        MANIFEST,
        {
            "schema_version": 1,
            "command": "python artifacts/demo/make.py all",
            "seed": SEED,
            "versions": versions(),
            "pretraining": pretraining,
            "branch_blind_floor_nats": round(floor, 6),
            "branch_blind_floor_by_task": by_task,
            "files": files,
        },
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("data", "tokenizer", "backbone", "all"))
    what = parser.parse_args().what
    pretraining = None
    if what in ("data", "all"):
        make_data()
    if what == "tokenizer":
        make_tokenizer()
    if what in ("backbone", "all"):
        pretraining = make_backbone()
    if (BACKBONE / "tokenizer.json").exists() and DATA.exists():
        make_manifest(pretraining)


if __name__ == "__main__":
    main()
