"""Two programs that share no line say the same of every bundle and disclosure, whole or tampered with.

One is the verifier of `amends`, the other check_amends.py, which lies in every bundle. A tamperer holds the file here,
and in the harder half also the device's export key: then the list of files is signed again, and only chain, tree and
the log's own signature are left to tell.
"""

from __future__ import annotations

import ast
import gzip
import json
import random
import shutil
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from disclosing import amends, anchored, both, by_script, changed, identity_here, order, proved
from log_contract import Ledger, done, ended, facts, intended, opened

from amends import AgentKit
from amends.store import bundle, check_amends, note
from amends.store.audit import Terms, verify
from amends.store.bundle import Content
from amends.store.compact import compact
from amends.store.entry import leaf, parse
from amends.store.keys import Identity
from amends.store.merkle import Peaks, consistency_proof, inclusion_proof
from amends.store.redact import redact
from amends.store.sqlite import SqliteLog
from amends.store.trust import carried

SEED = 20260802
INTACT = {"verdict": "INTACT", "level": "local anchor", "findings": [], "not_proved": []}


class Device(dict[str, Any]):
    """folder: a bundle with plain openings, of which records were removed and an opening destroyed."""

    folder: Path
    identity: Identity
    head: bytes


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    made, root = Device(), tmp_path_factory.mktemp("device")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMENDS_HOME", str(root / "home"))
        patch.setenv("AMENDS_ANCHORS", str(root / "anchors"))
        AgentKit("shop", home=root / "home").close()
        made.identity = identity_here()
        log = SqliteLog(root / "log.db", Ledger(), made.identity)
        names = [f"s{number}" for number in range(160)]
        for name in names:
            log.commit(facts(opened(name, b'{"name":"x"}'), intended(name, 1), done(name, 1), ended(name)))
        log.sign_head()
        made.head = anchored()
        redact(log, [(6, 0)], basis="GDPR-17", by="Ada", note="asked for")
        removed = compact(log, names[3:40] + names[41:80], within_ms=1, use=lambda name: {"sagas": 1}, by="Ada")
        assert removed.entries == 4 * 76
        made.folder = root / "bundle"
        identity = made.identity
        with bundle.cut(log) as (evidence, head):
            content = Content(
                identity.origin, identity.log_key, identity.export_key, identity.export_seed, head, INTACT, "amends 0",
                "plain",
            )  # fmt: skip
            bundle.write(made.folder, evidence, content)
        log.close()
    yield made


def ours(folder: Path, *anchors: bytes) -> tuple[str, list[str]]:
    said = verify(folder, terms=Terms(anchors=tuple(carried("kept", text) for text in anchors)))
    return said.verdict, [finding.code for finding in said.findings]


def theirs(folder: Path, *anchors: bytes) -> tuple[str, list[str]]:
    report = check_amends.Report()
    try:
        check_amends.check_bundle(str(folder), [("kept", text) for text in anchors], report)
    except check_amends.Bad as error:
        report.find(*error.args)
    return report.verdict(), [code for code, _ in report.findings]


def sealed_again(folder: Path, seed: bytes) -> None:
    """Manifest and list made to fit the files, and signed with this export key."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    manifest = json.loads((folder / "manifest.json").read_text())
    told = [name for name in files if name not in bundle.UNLISTED and name != "manifest.json"]
    manifest["files"] = {
        name: {"sha256": sha256(data).hexdigest(), "bytes": len(data), "lines": data.count(b"\n")}
        for name in told
        if not name.startswith("tile/")
        for data in [(folder / name).read_bytes()]
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    names = sorted([*told, "manifest.json"])
    listed = "".join(f"{sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names).encode()
    (folder / "SHA256SUMS").write_bytes(listed)
    (folder / "SHA256SUMS.sig").write_bytes(bundle.signify_signature(seed, listed))
    (folder / "SHA256SUMS.minisig").write_bytes(bundle.minisign_signature(seed, listed, "x"))


def copied(device: Device, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(device.folder, folder)
    return folder


# ---- what is whole --------------------------------------------------------------------------------------------------


@pytest.mark.promise("6.8")
def test_both_say_that_a_whole_bundle_is_intact_and_a_bare_python_says_so_too(device: Device, tmp_path: Path) -> None:
    assert ours(device.folder) == theirs(device.folder) == ("INTACT", [])
    assert ours(device.folder, device.head)[0] == theirs(device.folder, device.head)[0] == "INTACT"
    (tmp_path / "head").write_bytes(device.head)
    said = by_script(device.folder, "--anchor", tmp_path / "head")
    assert said.returncode == 0 and "outside anchor" in said.stdout, said.stdout + said.stderr
    assert "304 of them removed" in said.stdout and "not proved" in said.stdout
    sealed_again(copy := copied(device, tmp_path / "again"), device.identity.export_seed)
    assert ours(copy) == theirs(copy) == ("INTACT", [])


@pytest.mark.promise("6.8")
def test_the_bundle_carries_the_program_and_it_runs_from_there(device: Device) -> None:
    assert (device.folder / "check_amends.py").read_bytes() == Path(check_amends.__file__).read_bytes()


@pytest.mark.promise("6.8")
def test_the_program_needs_nothing_but_the_standard_library_and_no_new_python() -> None:
    source = Path(check_amends.__file__).read_text(encoding="utf-8")
    tree = ast.parse(source, feature_version=(3, 8))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert imported <= sys.stdlib_module_names and not any(isinstance(n, ast.ImportFrom) for n in ast.walk(tree))
    assert not any(isinstance(node, ast.Assert) for node in ast.walk(tree)), "python -O would leave those out"


def test_what_it_is_called_with_wrongly_is_usage(tmp_path: Path) -> None:
    for words in ((), ("--help",), ("a", "b"), ("a", "--anchor"), (str(tmp_path / "missing"),)):
        assert check_amends.main(list(words)) == 2
    (tmp_path / "no.json").write_text("{}")
    assert check_amends.main([str(tmp_path / "no.json")]) == 7
    assert check_amends.main([str(tmp_path)]) == 1


# ---- bundles that were tampered with --------------------------------------------------------------------------------

ENTRIES, OPENED, PLACES = "entries/000000.ndjson", "openings/000000.ndjson", "openings/000000.tsv"


def lines(folder: Path, name: str, change: Callable[[list[bytes]], Any]) -> None:
    rows = (folder / name).read_bytes().splitlines(True)
    change(rows)
    (folder / name).write_bytes(b"".join(rows))


def dropped(place: int, name: str = ENTRIES) -> Callable[[Path, random.Random], None]:
    return lambda folder, dice: lines(folder, name, lambda rows: rows.pop(place))


def swapped(folder: Path, dice: random.Random) -> None:
    def change(rows: list[bytes]) -> None:
        i = dice.randrange(1, len(rows) - 1)
        rows[i], rows[i + 1] = rows[i + 1], rows[i]

    lines(folder, ENTRIES, change)


def doubled(folder: Path, dice: random.Random) -> None:
    lines(folder, ENTRIES, lambda rows: rows.insert(5, rows[5]))


def edited(folder: Path, dice: random.Random) -> None:
    lines(folder, ENTRIES, lambda rows: rows.__setitem__(8, rows[8].replace(b'"step":1', b'"step":2')))


def relinked(folder: Path, dice: random.Random) -> None:
    """A record is edited and every one after it hashed anew: only the signature is left to tell."""

    def change(rows: list[bytes]) -> None:
        at = next(i for i, row in enumerate(rows) if parse(row).seq > 330)
        rows[at] = rows[at].replace(b'"kind":"', b'"kind":"x', 1)
        for i in range(at + 1, len(rows)):
            rows[i] = rows[i].replace(parse(rows[i]).prev.encode(), leaf(rows[i - 1]).hex().encode(), 1)

    lines(folder, ENTRIES, change)


def forged_gap(folder: Path, dice: random.Random) -> None:
    """A record is taken out, and its hash put among the stubs as if it had been compacted."""
    rows = (folder / ENTRIES).read_bytes().splitlines(True)
    row = next(row for row in rows if parse(row).seq == 500)
    lines(folder, ENTRIES, lambda all: all.remove(row))
    lines(folder, "stubs.tsv", lambda all: all.append(b"500\t0\t%s\n" % leaf(row).hex().encode()))
    _drop_openings(folder, 500)


def forged_boot(folder: Path, dice: random.Random) -> None:
    """The same with a record that belongs to no saga, so that no count tells."""
    rows = (folder / ENTRIES).read_bytes().splitlines(True)
    assert parse(rows[1]).kind == "log.booted" and parse(rows[1]).seq == 1
    lines(folder, ENTRIES, lambda all: all.pop(1))
    lines(folder, "stubs.tsv", lambda all: all.insert(0, b"1\t0\t%s\n" % leaf(rows[1]).hex().encode()))


def _drop_openings(folder: Path, seq: int) -> None:
    places = (folder / PLACES).read_bytes().splitlines(True)
    opened = (folder / OPENED).read_bytes().splitlines(True)
    kept = [(p, o) for p, o in zip(places, opened, strict=True) if int(p.split(b"\t")[0]) != seq]
    (folder / PLACES).write_bytes(b"".join(p for p, _ in kept))
    (folder / OPENED).write_bytes(b"".join(o for _, o in kept))


def gone_opening(folder: Path, dice: random.Random) -> None:
    _drop_openings(folder, 502)


def fake_redaction(folder: Path, dice: random.Random) -> None:
    """An opening is taken out, and a record at the end says that somebody wanted that."""
    _drop_openings(folder, 502)
    rows = (folder / ENTRIES).read_bytes().splitlines(True)
    last = parse(rows[-1])
    line = b'{"seq":%d,"prev":"%s","at":%d,"kind":"redaction.made","up":[1,9],"basis":"x","places":[[502,0]],' % (
        last.seq + 1, leaf(rows[-1]).hex().encode(), last.at + 1,
    )  # fmt: skip
    lines(folder, ENTRIES, lambda all: all.append(line + b'"salt":"AAAAAAAAAAAAAAAAAAAAAA"}\n'))


def other_opening(folder: Path, dice: random.Random) -> None:
    lines(folder, OPENED, lambda rows: rows.__setitem__(3, b'["AAAAAAAAAAAAAAAAAAAAAA",{"args":{"n":2}}]\n'))


def stub(change: Callable[[list[bytes]], bytes]) -> Callable[[Path, random.Random], None]:
    def tamper(folder: Path, dice: random.Random) -> None:
        def one(rows: list[bytes]) -> None:
            place = dice.randrange(len(rows))
            rows[place] = change(rows[place].rstrip().split(b"\t"))

        lines(folder, "stubs.tsv", one)

    return tamper


def head(name: str, by: bytes | None = None) -> Callable[[Path, random.Random], None]:
    """Another root in a signed head; `by`: signed by a stranger under the log's name."""

    def tamper(folder: Path, dice: random.Random) -> None:
        path = folder / name
        origin, size, _, *rest = path.read_text().split("\n")
        body = f"{origin}\n{size}\n{b64encode(bytes(32)).decode()}\n"
        text = note.sign_note(body.encode(), origin, by).decode() if by else body + "\n".join(rest)
        path.write_text(text)

    return tamper


def cut(folder: Path, dice: random.Random) -> None:
    lines(folder, ENTRIES, lambda rows: rows.__delitem__(slice(-20, None)))


def extra(folder: Path, dice: random.Random) -> None:
    (folder / "README2.txt").write_text("more\n")


def linked(folder: Path, dice: random.Random) -> None:
    (folder / "README.txt").rename(folder / "README")
    (folder / "README.txt").symlink_to("README")


def missing(folder: Path, dice: random.Random) -> None:
    (folder / "README.txt").unlink()


def flipped(name: str) -> Callable[[Path, random.Random], None]:
    def tamper(folder: Path, dice: random.Random) -> None:
        path = next(path for path in sorted(folder.glob(name)) if path.is_file())
        data = bytearray(path.read_bytes())
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(bytes(data))

    return tamper


MUTANTS: dict[str, Callable[[Path, random.Random], None]] = {
    "the first record is dropped": dropped(0),
    "a record is dropped": dropped(7),
    "the last record is dropped": dropped(-1),
    "records are swapped": swapped,
    "a record is doubled": doubled,
    "a record is edited": edited,
    "a record is edited and the chain made again": relinked,
    "a gap is forged": forged_gap,
    "a gap of no saga is forged": forged_boot,
    "an opening is gone": gone_opening,
    "a redaction is faked": fake_redaction,
    "an opening is another one": other_opening,
    "an opening has no place": dropped(5, PLACES),
    "a stub is dropped": dropped(0, "stubs.tsv"),
    "a stub has another hash": stub(lambda row: b"\t".join([row[0], row[1], b"0" * 64]) + b"\n"),
    "a stub is wider": stub(lambda row: b"\t".join([row[0], b"%d" % (int(row[1]) + 1), row[2]]) + b"\n"),
    "the head has another root": head("checkpoint"),
    "a stranger signed the head": head("checkpoint", bytes(32)),
    "the end is cut": cut,
    "bits flip in a record": flipped(ENTRIES),
    "bits flip in an opening": flipped(OPENED),
    "bits flip in a stub": flipped("stubs.tsv"),
    "bits flip in the head": flipped("checkpoint"),
}
FILES: dict[str, Callable[[Path, random.Random], None]] = {
    "there is a file more": extra,
    "there is a file less": missing,
    "a file is a link": linked,
    "bits flip in the list": flipped("SHA256SUMS"),
    "bits flip in the manifest": flipped("manifest.json"),
    "bits flip in the program": flipped("check_amends.py"),
    "bits flip in a tile": flipped("tile/**/*"),
    "bits flip in a key": flipped("keys/device.pem"),
}


@pytest.mark.promise("6.8")
@pytest.mark.parametrize("name", [*MUTANTS, *FILES])
def test_whoever_holds_the_bundle_changes_nothing_unseen_by_either(device: Device, tmp_path: Path, name: str) -> None:
    dice = random.Random(f"{SEED} {name}")
    print(f"seed {SEED} {name}")
    folder = copied(device, tmp_path / "bundle")
    (MUTANTS | FILES)[name](folder, dice)
    first, second = ours(folder), theirs(folder)
    assert first[0] != "INTACT" != second[0], (first, second)


@pytest.mark.promise("6.8")
@pytest.mark.parametrize("name", MUTANTS)
def test_whoever_has_the_export_key_as_well_changes_nothing_unseen_by_either(
    device: Device, tmp_path: Path, name: str
) -> None:
    dice = random.Random(f"{SEED} {name}")
    print(f"seed {SEED} {name}")
    for _ in range(4 if "flip" in name else 1):
        folder = copied(device, tmp_path / "bundle")
        MUTANTS[name](folder, dice)
        sealed_again(folder, device.identity.export_seed)
        first, second = ours(folder), theirs(folder)
        assert first[0] != "INTACT" != second[0], (first, second)


@pytest.mark.promise("6.8")
def test_another_device_under_a_kept_head_is_seen_by_both(device: Device, tmp_path: Path) -> None:
    kit = AgentKit("shop", home=tmp_path / "home")
    order(kit, "one")
    kit.close()
    assert amends("export", "--out", tmp_path / "other").exit_code == 0
    assert ours(tmp_path / "other")[0] == theirs(tmp_path / "other")[0] == "INTACT"
    first, second = ours(tmp_path / "other", device.head), theirs(tmp_path / "other", device.head)
    assert first[0] == second[0] == "ROLLED-BACK", (first, second)


@pytest.mark.promise("6.8")
def test_another_history_under_a_kept_head_is_a_fork_to_both(device: Device) -> None:
    identity, size = device.identity, note.parse_checkpoint(device.head.split(b"\n\n")[0] + b"\n").size
    for at, verdict in ((size, "FORKED"), (10_000, "ROLLED-BACK")):
        kept = identity.note(at, bytes(32), identity.sign(at, bytes(32)))
        assert ours(device.folder, kept)[0] == theirs(device.folder, kept)[0] == verdict


@pytest.mark.promise("6.8")
def test_a_gap_that_no_compaction_names_is_seen_by_both(device: Device, tmp_path: Path) -> None:
    folder = copied(device, tmp_path / "bundle")
    forged_boot(folder, random.Random(SEED))
    sealed_again(folder, device.identity.export_seed)
    assert "E_GAP" in ours(folder)[1] and "E_GAP" in theirs(folder)[1], (ours(folder), theirs(folder))


@pytest.mark.promise("6.8")
def test_of_a_sealed_bundle_both_check_all_but_what_is_sealed(tmp_path: Path) -> None:
    kit = AgentKit("shop", home=tmp_path / "home")
    for number in range(3):
        order(kit, f"order-{number}")
    kit.close()
    key = f"file:{tmp_path / 'owner'}"
    assert amends("seal", "--new-key", tmp_path / "owner", "--by", "Ada").exit_code == 0
    assert amends("forget", "order-0", "--key", key, "--by", "Ada", "--reason", "asked").exit_code == 0
    for payload in ("sealed", "plain"):
        folder = tmp_path / payload
        assert amends("export", "--out", folder, "--payload", payload, "--key", key).exit_code == 0
        assert ours(folder)[0] == theirs(folder)[0] == "INTACT", (payload, ours(folder), theirs(folder))
    opened, seed = "openings.sealed/000000.ndjson", identity_here().export_seed
    for change in (lambda rows: rows.pop(-3), lambda rows: rows.append(rows[-3]), lambda rows: rows.reverse()):
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "sealed", folder)
        lines(folder, opened, change)
        sealed_again(folder, seed)
        assert ours(folder)[0] != "INTACT" != theirs(folder)[0], (ours(folder), theirs(folder))


LAXER = {
    "counts in the manifest": ("manifest.json", lambda text: text.replace('"removed": 304', '"removed": 305')),
    "a tile": ("tile/**/*", None),
}
"""What only the verifier of `amends` holds against the records, where the export key's holder has signed it again: the
standalone one says under "not proved" that it compares tiles with their list only, and prints its own counts."""


@pytest.mark.parametrize("name", LAXER)
def test_where_the_two_differ_is_known(device: Device, tmp_path: Path, name: str) -> None:
    folder = copied(device, tmp_path / "bundle")
    file, change = LAXER[name]
    if change is None:
        flipped(file)(folder, random.Random(SEED))
    else:
        text = (folder / file).read_text()
        loose = json.dumps(json.loads(text))
        assert change(loose) != loose
        (folder / file).write_text(change(loose))
    sealed_again(folder, device.identity.export_seed)
    assert ours(folder)[0] == "TAMPERED" and theirs(folder)[0] == "INTACT"


# ---- disclosures ----------------------------------------------------------------------------------------------------


@pytest.mark.promise("6.8")
def test_both_say_the_same_of_disclosures_that_were_tampered_with_at_random(tmp_path: Path) -> None:
    kit = AgentKit("shop", home=tmp_path / "home")
    for number in range(3):
        order(kit, f"order-{number}", inside="packing" if number else "")
    kit.close()
    text, dice = proved(tmp_path, "order-1"), random.Random(SEED)
    print(f"seed {SEED}")
    passed = 0
    for turn in range(120):
        tampered = changed(text, lambda document: _tamper(document, dice))
        first, second = both(tampered, tmp_path)
        intact = first.verdict == "INTACT"
        assert intact == (second.verdict() == "INTACT"), (turn, first.findings, second.findings)
        assert not intact or _without_openings(tampered) == _without_openings(text), turn
        passed += intact
    print(f"{passed} of 120 only hid an opening, or changed nothing")


def _without_openings(text: bytes) -> Any:
    """Who hands it out may show less."""
    document = json.loads(text)
    for item in document["entries"]:
        item.pop("open", None)
    return document


def _tamper(document: dict[str, Any], dice: random.Random) -> None:
    """Something is dropped, doubled, moved or edited, anywhere."""
    spots: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            spots.append((value, key))
            if isinstance(value[key], dict | list):
                walk(value[key])

    walk(document)
    holder, key = dice.choice(spots)
    if isinstance(holder, list):
        other = dice.randrange(len(holder))
        choice = dice.randrange(3)
        if choice == 0:
            del holder[key]
        elif choice == 1:
            holder[key], holder[other] = holder[other], holder[key]
        else:
            holder.insert(other, holder[key])
    elif isinstance(holder[key], str):
        place = dice.randrange(len(holder[key]))
        holder[key] = holder[key][:place] + chr(ord(holder[key][place]) ^ 1) + holder[key][place + 1 :]
    else:
        del holder[key]


# ---- published vectors ----------------------------------------------------------------------------------------------


def published(vectors: Path, name: str) -> Any:
    data = (vectors / name).read_bytes()
    return json.loads(gzip.decompress(data) if name.endswith(".gz") else data)


def digest(accepted: list[str]) -> str:
    return sha256("\n".join(accepted).encode()).hexdigest()[:16]


@pytest.mark.promise("6.8")
def test_both_accept_the_same_published_signatures(vectors: Path) -> None:
    tried: list[tuple[str, bytes, bytes, bytes]] = []
    for group in published(vectors, "wycheproof-ed25519.json.gz")["testGroups"]:
        public = bytes.fromhex(group["publicKey"]["pk"])
        tried += [(f"w{c['tcId']}", public, bytes.fromhex(c["msg"]), bytes.fromhex(c["sig"])) for c in group["tests"]]
    for case in published(vectors, "cctv-ed25519.json.gz")["vectors"]:
        key, message, signature = bytes.fromhex(case["key"]), case["msg"].encode(), bytes.fromhex(case["sig"])
        tried.append((f"c{case['number']}", key, message, signature))
    one = [name for name, *given in tried if note.verify(*given)]
    two = [name for name, *given in tried if check_amends.ed25519(*given)]
    assert one == two and len(tried) == 151 + 914
    assert (len(one), digest(one)) == (88 + 43, GOLDEN_SIGNATURES)


@pytest.mark.promise("6.8")
def test_a_key_of_small_order_signs_for_nobody() -> None:
    weak = bytes([1]) + bytes(31)  # the neutral point: with S = 0 the equation holds for every message
    assert not check_amends.ed25519(weak, b"anything", weak + bytes(32))
    assert not note.verify(weak, b"anything", weak + bytes(32))
    signature = note.sign(bytes(32), b"anything")
    assert check_amends.ed25519(note.public_of(bytes(32)), b"anything", signature)


GOLDEN_SIGNATURES = "95936e8f131df72b"


@pytest.mark.promise("6.8")
def test_both_judge_published_proofs_alike(vectors: Path) -> None:
    def hashes(texts: list[str] | None) -> list[bytes]:
        return [b64decode(text or "") for text in texts or []]

    wrong = []
    for line in (vectors / "merkle-inclusion.ndjson").read_text().splitlines():
        case = json.loads(line)
        leaf_hash, root = hashes([case["leafHash"], case["root"]])
        sound = all(len(hash) == 32 for hash in (leaf_hash, root, *hashes(case["proof"])))
        index, size = case["leafIdx"], case["treeSize"]
        told = sound and index >= 0 and check_amends.included(leaf_hash, index, size, hashes(case["proof"]), root)
        wrong += [case["_path"]] if told is case["wantErr"] else []
    assert wrong == []
    for line in (vectors / "merkle-consistency.ndjson").read_text().splitlines():
        case = json.loads(line)
        old, new = hashes([case["root1"], case["root2"]])
        sound = all(len(hash) == 32 for hash in (old, new, *hashes(case["proof"])))
        told = sound and check_amends.grown(case["size1"], case["size2"], old, new, hashes(case["proof"]))
        wrong += [case["_path"]] if told is case["wantErr"] else []
    # Two "roots" of 12 bytes that are equal: we ask for hashes of 32.
    assert wrong == ["testdata/consistency/additional/sizes-are-equal-one-and-proof-is-empty.json"]


@pytest.mark.promise("6.8")
def test_the_other_tree_is_grown_and_proved_alike(vectors: Path) -> None:
    log = published(vectors, "tessera-log15.json")
    entries = [entry.encode() for entry in log["leaves"]]
    heads = {}
    for name, text in log["files_b64"].items():
        if name.startswith("checkpoint."):
            _, size, root = b64decode(text).decode().split("\n")[:3]
            heads[int(size)] = b64decode(root)
    tree = check_amends.Tree()
    assert tree.root() == heads[0]
    for size, entry in enumerate(entries, 1):
        tree.append(0, check_amends.leaf(entry))
        assert tree.root() == heads[size]
    leaves = [check_amends.leaf(entry) for entry in entries]

    class Reader:
        def leaf(self, i: int) -> bytes:
            return leaves[i]

        def run(self, n: int) -> bytes:
            raise AssertionError(n)

        def gaps(self, low: int, high: int) -> list[Any]:
            return []

    for new in range(1, 16):
        for at in range(new):
            proof = inclusion_proof(Reader(), at, new)
            assert check_amends.included(leaves[at], at, new, proof, heads[new])
            assert not check_amends.included(leaves[at], (at + 1) % new, new, proof, heads[new]) or new == 1
        for old in range(1, new + 1):
            proof = consistency_proof(Reader(), old, new)
            assert check_amends.grown(old, new, heads[old], heads[new], proof)
            assert old == new or not check_amends.grown(old, new, bytes(32), heads[new], proof)


def test_the_published_signed_note_is_read_by_both(vectors: Path) -> None:
    """The note of another log under its own name: the strict reading of ours refuses the name and takes the key."""
    log = published(vectors, "tessera-log15.json")
    key = note.parse_vkey(log["vkey"])
    text = b64decode(log["files_b64"]["checkpoint"])
    assert note.open_note(text, [key]).signatures[0].key == key
    with pytest.raises(check_amends.Bad) as refused:
        check_amends.head_of(text, key.public)
    assert refused.value.args[0] == "E_IDENTITY"
    body, _, line = text.partition(b"\n\n")
    assert check_amends.ed25519(key.public, body + b"\n", b64decode(line.split()[-1])[4:])


def test_trees_of_any_size_have_one_root() -> None:
    peaks, tree = Peaks(), check_amends.Tree()
    for i in range(300):
        hash = leaf(b"%d" % i)
        peaks.extend([hash])
        tree.append(0, hash)
        assert tree.root() == peaks.root()
