
def test_x(ps, whole, world, reference_run, tmp_path):
    a = reference_run(whole, tmp_path / "a", world["flags"], steps=(2, 6))
    b = reference_run(whole, tmp_path / "b", world["flags"], steps=(2, 4))
    for args in (("inspect", a), ("verify", a), ("verify", a / "step_checkpoints" / "step_000000006"), ("merge", a, b, "--out", tmp_path/"m"), ("snapshot", a), ("verify", a, "--replay", 2), ("resume", a, "--out", tmp_path / "o", "--set", f"data.root={world['root']}", "--max-steps", 15), ("verify", tmp_path / "o", "--replay", 2), ("inspect", tmp_path/"o")):
        r = ps(*args)
        print("=====", args, r.returncode); print(r.stdout[:2500]); print(r.stderr[:2500])
    print((tmp_path/"o"/"train.log").read_text()[:3000])
    assert 0
