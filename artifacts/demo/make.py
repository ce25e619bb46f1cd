"""Make the built-in demo: data files, tokenizer, a small pretrained backbone and their manifest.

    python artifacts/demo/make.py data | tokenizer | backbone | all

Everything is generated from SEED and nothing is downloaded. It needs torch, transformers 5.x and tokenizers; `backbone`
takes two to five minutes on one core. Each command rewrites manifest.json for the files that are there. The result is
committed, so users need none of this.

The demo's world: people have family names, and families live in cities. A few short lists (the branches) state such
facts, and every question needs two facts that stand in different lists.

Why a small backbone can learn it: it is pretrained as an ordinary causal LM on plain text (lists, then "Question:"
and "Answer:" lines, all in one sequence) from a start in which one look-up circuit is laid out (start_with_lookup).
So it finds facts in its context, but has never seen the chat format, nor lists that were encoded apart from each other
at overlapping positions; that is left to the trainer.
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
TRAIN_ROWS, HELDOUT_ROWS = 800, 64  # per task
STEPS, BATCH, PEAK_LR, WARMUP = 500, 16, 2e-3, 50  # pretraining
INIT_STD, ROPE_THETA = 0.08, 1e6
LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM = 3, 128, 256, 4, 2, 32
VOCAB_LIMIT, MAX_POSITIONS, THREADS = 1024, 1024, 1

NAMES = """Ann Bob Carl Dana Eva Finn Gina Hugo Ida Jack Kate Leo Mia Nick Olga Paul
Rosa Sam Tina Vera Will Zoe Adam Beth Clara Dean Emma Fred Grace Hans Iris John""".split()
FAMILIES = """Baker Fisher Miller Mason Cook Hunter Carter Potter Taylor Turner Walker Weaver Parker Palmer Porter
Brewer Butler Cooper Dyer Fuller Glover Harper Archer Sadler""".split()
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
    """Some people with their family names, and the cities where these families live."""

    def __init__(self, rng, people):
        self.people = rng.sample(NAMES, people)
        self.family = {p: rng.choice(FAMILIES) for p in self.people}
        self.city = {family: rng.choice(CITIES) for family in FAMILIES}

    def facts(self):
        families = sorted(set(self.family.values()))
        return [("family", p) for p in self.people], [("city", family) for family in families]

    def state(self, kind, of):
        """A fact in words. The value stands right after its key: the pattern that a small model looks up most easily."""
        return f"{of} {self.family[of] if kind == 'family' else self.city[of]}"


def ask(world, task, a, b):
    """Question, answer, and the two facts needed. The answer states both facts in the words of the lists."""
    hop = task == "demo_hop"
    needed = ("family", a), ("city", world.family[a]) if hop else ("family", b)
    first, second = (world.state(*fact) for fact in needed)
    if hop:
        return f"Which city is {a} from?", f"Answer: {first}, {second}.", needed
    return f"What are the family names of {a} and {b}?", f"Answer: {first} and {second}.", needed


TASKS = ("demo_pair", "demo_hop")


def report(rng, world, facts):
    """The text of a branch: a list of guests, or a list of addresses, or both."""
    parts = []
    for kind, title in (("family", "Guests"), ("city", "Addresses")):
        stated = [world.state(*fact) for fact in facts if fact[0] == kind]
        if stated:
            parts.append(f"{title} on {rng.choice(DAYS)}: {', '.join(stated)}.")
    rng.shuffle(parts)
    return " ".join(parts)


# ---- data ------------------------------------------------------------------------------------------------------------


def is_heldout(task, world, a, b):
    """The split, by combinations: a held-out row never asks for a combination that a training row asks for.

    pair: the two people asked about. hop: the chain of person, family and city."""
    if task == "demo_hop":
        family = world.family[a]
        return (NAMES.index(a) + FAMILIES.index(family) + CITIES.index(world.city[family])) % 4 == 0
    return (NAMES.index(a) + NAMES.index(b)) % 4 == 0


def make_row(rng, task, heldout, number):
    while True:
        world = World(rng, people=rng.randint(4, 6))
        a, b = world.people[:2]
        if is_heldout(task, world, a, b) == heldout:
            break
    question, answer, needed = ask(world, task, a, b)
    # The two facts asked for go into different branches; the others are spread over all of them.
    guests, addresses = world.facts()
    others = [fact for fact in guests + addresses if fact not in needed]
    rng.shuffle(others)
    count = min(rng.choice((2, 2, 3, 3, 4, 5)), len(others))
    branches = [[others.pop()] for _ in range(count)]
    for fact in others:
        rng.choice(branches).append(fact)
    for fact, at in zip(needed, rng.sample(range(count), 2), strict=True):
        branches[at].insert(rng.randint(0, len(branches[at])), fact)
    texts = [report(rng, world, facts) for facts in branches]
    row = {
        "id": f"{task}-{'heldout' if heldout else 'train'}-{number:04d}",
        "question": question,
        "query": question,
        "gold": answer,
        "references": [f"{world.state(*fact)}." for fact in needed],
        "agent_reference_contexts": texts,
    }
    if task == "demo_pair" and number % 2 == 1:
        # As in a tool history: all branches share what went before, and only their own end is kept.
        chores = ", ".join(rng.sample(CHORES, 3))
        prefix = f"The helper {chores} and writes a list on {rng.choice(DAYS)}."
        row["agent_extract_contexts"] = texts
        row["agent_reference_contexts"] = [f"{prefix} {text}" for text in texts]
    return row


def make_data():
    DATA.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        for split, rows in (("train", TRAIN_ROWS), ("heldout", HELDOUT_ROWS)):
            rng = random.Random(f"{SEED} {task} {split}")  # a text seeds alike on every machine
            made = [make_row(rng, task, split == "heldout", number) for number in range(rows)]
            text = "".join(json.dumps(row) + "\n" for row in made)
            (DATA / f"{task}.{split}.jsonl").write_bytes(text.encode())


def branch_blind_nats(task):
    """Entropy of a held-out answer given its query alone, in nats.

    The generator draws what the query does not give uniformly from a set whose size is known here; so the entropy is
    exact, and by Gibbs' inequality no reader of the query alone, whatever it knows about the generator and the split,
    has a lower expected cross-entropy. All other tokens of the answer follow from the query and those words.
    pair: two family names, independent. hop: a family and a city such that the chain is a held-out one; the sum rule
    of the split leaves a quarter of the cities for every person and family."""
    if task == "demo_pair":
        return 2 * math.log(len(FAMILIES))
    assert len(CITIES) % 4 == 0
    return math.log(len(FAMILIES) * len(CITIES) // 4)


# ---- tokenizer -------------------------------------------------------------------------------------------------------


def make_tokenizer():
    """Byte-level BPE: every word of the demo is one token, with and without a blank before it; any text encodes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    words = NAMES + FAMILIES + CITIES + DAYS
    sentences = [
        "You are a helpful assistant.", "system\nuser\nassistant\n", "Question: Answer: Guests on Addresses on",
        "What are the family names of them and them? Which city is she from?",
        "The helper and writes a list on", *CHORES,
    ]  # fmt: skip
    corpus = [text for word in words + sentences for text in (word, f" {word}")]
    corpus += [text for sentence in sentences for word in sentence.split() for text in (word, f" {word}")]
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
    for word in [*words, "Answer", "Question"]:
        for text in (word, f" {word}"):
            assert len(tokenizer.encode(text).ids) == 1, f"{text!r} is not one token: raise VOCAB_LIMIT"
    return tokenizer


# ---- backbone --------------------------------------------------------------------------------------------------------


def pretraining_text(rng, ease):
    """One training sequence: some lists, a list that states their facts again, then questions with answers.

    The restatement teaches looking up most cheaply: one fact to find for every three tokens of text. ease goes
    from 1 (few facts) to 0 (as many as in the data)."""
    easy = ease > 0.8
    world = World(rng, people=3 if easy else rng.randint(3, 6))
    facts = [fact for group in rng.sample(world.facts(), rng.randint(1, 2)) for fact in group]
    rng.shuffle(facts)
    lines, left = [], list(facts)
    while left:
        size = rng.randint(1, 5)
        lines.append(report(rng, world, left[:size]))
        left = left[size:]
    rest = [report(rng, world, rng.sample(facts, len(facts))) for _ in range(2 if easy else 1)]
    asked = []
    for a in world.people:
        asked += [ask(world, "demo_pair", a, b) for b in world.people if b != a]
        asked += [ask(world, "demo_hop", a, None)] * len(world.people)
    asked = [(question, answer) for question, answer, needed in asked if set(needed) <= set(facts)]
    rng.shuffle(asked)
    rest += [f"Question: {question}\n{answer}" for question, answer in asked[: rng.randint(1, 3)]]
    return "\n".join([*lines, *rest]) + "\n" + END_OF_TEXT


def start_with_lookup(model):
    """Initialise one look-up circuit (an induction head), in place; all other weights stay random, and all are trained.

    A head of layer 0 looks one token back and writes that token into a subspace of its own; a head of layer 1 compares
    the current token with it and copies the token it finds. Models of this size find the circuit from a random start
    too, but only after a long plateau on which they name any word of the right kind; from here on, minutes do."""
    import torch

    half, fast, size = HEAD_DIM // 2, 4, 24
    # Queries and keys turn with the distance in the fast rotary pairs, and hardly at all in the slow ones: the former
    # can tell neighbours apart, the latter can compare words.
    quick = [*range(fast), *range(half, half + fast)]
    slow = [*range(half - size // 2, half), *range(HEAD_DIM - size // 2, HEAD_DIM)]
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    basis = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN))[0].T.contiguous()
    basis[:, 0] = 0.0
    word, previous, copied = basis[:size], basis[size : 2 * size], basis[2 * size : 2 * size + HEAD_DIM]
    speed = model.model.rotary_emb.inv_freq[:fast]
    with torch.no_grad():
        for layer in model.model.layers:  # what the layers add starts small, so that the words stay readable
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
        # Channel 0 of the embedding is a constant, which the looking back reads alone: its score depends on the
        # distance only, and its query is the key rotated back by one position.
        model.model.embed_tokens.weight[:, 0] = 0.5
        for attention in (first, second):
            for weight in (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight):
                weight[:HEAD_DIM] = 0.0
        first.k_proj.weight[:fast, 0] = 1.0
        first.q_proj.weight[quick, 0] = torch.cat([torch.cos(speed), -torch.sin(speed)])
        first.q_norm.weight[quick] = 2.5
        first.v_proj.weight[:size] = word
        first.o_proj.weight[:, :HEAD_DIM] = 0.0
        first.o_proj.weight[:, :size] = 0.2 * previous.T
        second.q_proj.weight[slow] = word
        second.k_proj.weight[slow] = previous
        second.q_norm.weight.fill_(2.0)
        second.v_proj.weight[:HEAD_DIM] = copied
        second.o_proj.weight[:, :HEAD_DIM] = 0.4 * copied.T


def make_backbone():
    import torch
    from safetensors.torch import save
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
    start_with_lookup(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    rng = random.Random(f"{SEED} pretraining")
    started, recent = time.perf_counter(), []
    for step in range(STEPS):
        ramp = min(1.0, (step + 1) / WARMUP)
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * ramp * cosine
        texts = [pretraining_text(rng, ease=1 - step / STEPS) for _ in range(BATCH)]
        rows = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
        width = max(map(len, rows))
        # Right padding is harmless under a causal mask when the padded targets do not count.
        ids = torch.tensor([row + [eos] * (width - len(row)) for row in rows])
        labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent = [*recent, loss.item()][-100:]
        if (step + 1) % 100 == 0:
            passed = time.perf_counter() - started
            mean = sum(recent) / len(recent)
            print(f"step {step + 1}/{STEPS} loss {mean:.4f} {passed:.0f} s", file=sys.stderr)
    # The output layer is the embedding (tied), so it is stored once.
    weights = {
        name: w.detach().contiguous() for name, w in model.state_dict().items() if name != "lm_head.weight"
    }
    (BACKBONE / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **settings, "dtype": "float32"}
    write_json(BACKBONE / "config.json", config)
    write_json(
        BACKBONE / "generation_config.json", {"eos_token_id": eos, "pad_token_id": eos, "do_sample": False}
    )
    return {
        "command": "python artifacts/demo/make.py all", "steps": STEPS, "batch": BATCH, "peak_lr": PEAK_LR,
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
    "demo_pair": f"two independent uniform family names: 2 ln {len(FAMILIES)}",
    "demo_hop": f"{len(FAMILIES)} x {len(CITIES)} / 4 equally likely held-out (family, city) answers: ln of that",
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
