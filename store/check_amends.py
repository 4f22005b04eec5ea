#!/usr/bin/env python3
# mypy: ignore-errors
"""Checks a bundle or a disclosure of amends with nothing but Python 3.8 or newer: no network, nothing to install.

    python3 check_amends.py PATH [--anchor NOTE]...      PATH: the folder of a bundle, or the file of a disclosure

It is written from FORMAT.md alone, to be read in one sitting. What it shows: each record is the one that was hashed
(chain and tree), the log's key signed the head over all of them, nothing is missing in between without a record that
says so, and the openings that came along are those that were committed to. NOTE is a signed head that you got another
way: only that, or your knowing the log's name, tells whose log this is. Each finding is a line; the worst one is the
exit status: 0 intact, 1 tampered, 2 usage, 3 not verified, 4 rolled back, 5 forked, 7 malformed.
"""

import base64
import hashlib
import itertools
import json
import os
import re
import stat
import sys

WORST = ("TAMPERED", "FORKED", "ROLLED-BACK", "MALFORMED", "UNVERIFIED")
EXITS = {"INTACT": 0, "TAMPERED": 1, "UNVERIFIED": 3, "ROLLED-BACK": 4, "FORKED": 5, "MALFORMED": 7}
VERDICTS = {"E_FORKED": "FORKED", "E_ROLLED_BACK": "ROLLED-BACK", "E_IDENTITY": "ROLLED-BACK", "E_ANCHOR": "UNVERIFIED"}
VERDICTS.update(
    dict.fromkeys(("E_GRAMMAR", "E_VERSION", "E_NOTE", "E_DISCLOSURE"), "MALFORMED")
)  # all others: TAMPERED
HEX = re.compile("[0-9a-f]{64}")
LINE, OPENING, LIST, MANIFEST, FILE = 16384, 96 << 20, 64 << 20, 8 << 20, 256 << 20  # bytes that are read at most
VALUES = 8 << 20  # of a disclosure: what JSON makes of `[],[],…` takes twenty times their size


class Bad(Exception):
    """(code of a finding, reason): what follows cannot be read without it."""


def sha(data):
    return hashlib.sha256(data).digest()


def want(holds):
    if not holds:
        raise ValueError("it is outside the grammar")


def unbase64(text):
    data = base64.b64decode(text, validate=True)
    if base64.b64encode(data).decode() != text:
        raise ValueError("base64 with another spelling")
    return data


# ---- files: pipes, devices and links are not read, and nothing is read without end ----------------------------------


def opened(folder, name):
    flags = [getattr(os, word, 0) for word in ("O_RDONLY", "O_NONBLOCK", "O_NOFOLLOW", "O_BINARY")]
    file = os.fdopen(os.open(os.path.join(folder, name), sum(flags)), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{name} is no file")
    return file


def whole(folder, name, most):
    with opened(folder, name) as file:
        return limited(file, name, most)


def limited(file, name, most):
    data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{name} has more than {most} bytes")
    return data


def lines_in(folder, name, most):
    """The lines of a file; one that is too long comes cut, and is the last."""
    with opened(folder, name) as file:
        for line in iter(lambda: file.readline(most + 1), b""):
            yield line
            if len(line) > most:
                return


# ---- Ed25519 (RFC 8032), strict: S below the order, A and R canonical and not of small order ------------------------

P, L = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, P - 2, P) % P
Y8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
SMALL = (0, 1, P - 1, Y8, P - Y8)  # y of the eight points whose order divides 8


def point(data):
    """(X, Y, Z, T) of 32 bytes; None if they are no point, or not one to be believed."""
    sign, y = data[31] >> 7, int.from_bytes(data, "little") & ((1 << 255) - 1)
    if y >= P or y in SMALL:
        return None
    square = (y * y - 1) * pow(D * y * y + 1, P - 2, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    if (x * x - square) % P:
        return None
    x = P - x if x & 1 != sign else x
    return x, y, 1, x * y % P


def add(p, q):
    a, b = (p[1] - p[0]) * (q[1] - q[0]) % P, (p[1] + p[0]) * (q[1] + q[0]) % P
    c, d = 2 * p[3] * q[3] * D % P, 2 * p[2] * q[2] % P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % P, g * h % P, f * g % P, e * h % P


def times(scalar, p):
    out = (0, 1, 1, 0)
    for bit in bin(scalar)[2:]:
        out = add(out, out)
        out = add(out, p) if bit == "1" else out
    return out


BASE = point(bytes([0x58]) + bytes([0x66]) * 31)


def ed25519(public, message, signature):
    """Whether [S]B - [h]A is R, byte for byte."""
    if len(public) != 32 or len(signature) != 64:
        return False
    a, s = point(public), int.from_bytes(signature[32:], "little")
    if a is None or s >= L or point(signature[:32]) is None:
        return False
    h = int.from_bytes(hashlib.sha512(signature[:32] + public + message).digest(), "little") % L
    x, y, z, _ = add(times(s, BASE), times(h, (P - a[0], a[1], 1, P - a[3])))
    inverse = pow(z, P - 2, P)
    return (y * inverse % P | (x * inverse % P & 1) << 255).to_bytes(32, "little") == signature[:32]


# ---- the tree (RFC 6962; proofs as RFC 9162 2.1.3.2 and 2.1.4.2) ----------------------------------------------------


def leaf(line):
    return sha(b"\0" + line)


def node(left, right):
    return sha(b"\1" + left + right)


class Tree:
    """Grows by subtrees of 2**level leaves, left to right."""

    def __init__(self):
        self.size, self.peaks = 0, []

    def append(self, level, hash):
        self.size += 1 << level
        while self.peaks and self.peaks[-1][0] == level:
            hash = node(self.peaks.pop()[1], hash)
            level += 1
        self.peaks.append((level, hash))

    def root(self):
        if not self.peaks:
            return sha(b"")
        root = self.peaks[-1][1]
        for _, left in self.peaks[-2::-1]:
            root = node(left, root)
        return root


def included(hash, index, size, proof, root):
    if index >= size:
        return False
    last = size - 1
    for other in proof:
        if last == 0:
            return False
        if index & 1 or index == last:
            hash = node(other, hash)
            while index and not index & 1:
                index, last = index >> 1, last >> 1
        else:
            hash = node(hash, other)
        index, last = index >> 1, last >> 1
    return last == 0 and hash == root


def grown(old, new, old_root, new_root, proof):
    if old > new or old == new or not old:
        return not proof and (old_root == new_root if old == new else old == 0 and old_root == sha(b""))
    path = list(proof) if old & (old - 1) else [old_root, *proof]
    at, last = old - 1, new - 1
    while at & 1:
        at, last = at >> 1, last >> 1
    if not path:
        return False
    before = after = path[0]
    for other in path[1:]:
        if last == 0:
            return False
        if at & 1 or at == last:
            before, after = node(other, before), node(other, after)
            while at and not at & 1:
                at, last = at >> 1, last >> 1
        else:
            after = node(after, other)
        at, last = at >> 1, last >> 1
    return last == 0 and before == old_root and after == new_root


# ---- signed heads (C2SP signed-note, tlog-checkpoint) ---------------------------------------------------------------


def origin_of(key):
    return "amends.local/" + base64.b32encode(sha(key)).decode()[:26].lower()


def head_of(note, key):
    """(size, root) of a note that this log key signed."""
    origin = origin_of(key)
    try:
        body, _, lines = note.decode().rpartition("\n\n")
        name, size, root = body.split("\n")
        signed = [re.fullmatch("\u2014 ([^ +]+) ([^ ]+)", line).groups() for line in lines[:-1].split("\n")]
        signed = [(who, unbase64(data)) for who, data in signed]
        size = int(re.fullmatch("0|[1-9][0-9]{0,15}", size).group())
        if re.search(r"[\x00-\x09\x0b-\x1f]", body + lines) or lines[-1:] != "\n" or len(unbase64(root)) != 32:
            raise ValueError("a name, a size, a root, and whole signature lines are asked")
    except (ValueError, AttributeError) as error:
        raise Bad("E_NOTE", f"this is no signed head ({error})") from None
    if name != origin:
        raise Bad("E_IDENTITY", f"the head is of another log, {name}")
    id = sha(origin.encode() + b"\n\1" + key)[:4]
    ours = [data[4:] for who, data in signed if (who, data[:4]) == (origin, id)]
    if not ours or not all(ed25519(key, (body + "\n").encode(), data) for data in ours):
        raise Bad("E_SIGNATURE" if ours else "E_UNSIGNED", f"the key of {origin} did not sign this head")
    return size, unbase64(root)


# ---- records and openings -------------------------------------------------------------------------------------------


def loads(text):
    """JSON that can be read in one way only."""

    def once(pairs):
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a name stands twice")
        return dict(pairs)

    def never(word):
        raise ValueError(word)

    return json.loads(text, object_pairs_hook=once, parse_constant=never)


def record_of(line):
    """The fields of a record that say where it stands; the others are covered by its hash."""
    try:
        want(line.endswith(b"\n") and len(line) <= LINE)
        entry = loads(line.decode("ascii"))
        want(not re.search(rb"[^ -\[\]-~]", line[:-1]))
        want(all(type(entry[key]) is int for key in ("seq", "at")) and type(entry.get("n", 0)) is int)
        want(all(HEX.fullmatch(hash) for hash in [entry["prev"], *entry.get("c", [])]))
        entry["places"] = {(seq, place) for seq, place in entry.get("places", ())}
        entry["runs"] = [(first, last + 1) for first, last in entry.get("runs", ())]
        entry["near"] = {entry.get("parent"), entry.get("of")}  # sagas: inside which, after which
        i, k = entry.get("part", (1, 1))
        entry["ends"] = entry["kind"] == "saga.ended" and i == k
        return entry
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Bad("E_GRAMMAR", f"a record cannot be read ({error!r})") from None


def key_in(line):
    """The first record of a log, and the key that it names."""
    entry = record_of(line)
    if entry["seq"] or entry["kind"] != "log.opened" or not HEX.fullmatch(entry.get("log", "")):
        raise Bad("E_GENESIS", "the first record is no genesis")
    if entry.get("v") != 1:
        raise Bad("E_VERSION", "it was written by a newer version")
    return entry, bytes.fromhex(entry["log"])


def opens(line, commitment):
    """Whether this is the opening that was committed to: ["<salt>",{fields}] and a line feed."""
    try:
        salt, fields = loads(line.decode())
        sound = re.fullmatch("[A-Za-z0-9_-]{22}", salt) and type(fields) is dict
        return bool(sound) and sha(line).hex() == commitment
    except (ValueError, TypeError, RecursionError):
        return False


def say(text):
    """A line, with what a terminal would obey as escapes."""
    print(re.sub("[^ -~]", lambda found: ascii(found.group())[1:-1], text))


class Report:
    def __init__(self):
        self.findings, self.told = [], []
        self.level, self.summary = "none", "nothing could be read"

    def find(self, code, reason, seq=None):
        if len(self.findings) < 1000 or all(code != other for other, _ in self.findings):
            self.findings.append((code, reason if seq is None else f"record {seq}: {reason}"))

    def verdict(self):
        found = {VERDICTS.get(code, "TAMPERED") for code, _ in self.findings}
        return next((verdict for verdict in WORST if verdict in found), "INTACT")

    def says(self):
        verdict = self.verdict()
        say(f"{verdict}  {self.summary}; level: {self.level}")
        for code, reason in self.findings[:100]:
            say(f"{code} {reason}")
        for text in self.told if verdict == "INTACT" else ():
            say(f"not proved: {text}")
        return EXITS[verdict]

    def follows(self, one, line, two):
        """Between a record and the next one that is here."""
        if two["seq"] == one["seq"] + 1 and two["prev"] != leaf(line).hex():
            self.find("E_CHAIN", "it does not follow the record before it", two["seq"])
        if two["at"] <= one["at"]:
            self.find("E_TIME", "time stands still or goes back", two["seq"])

    def counts(self, sagas, entry):
        """A saga's records count up from its beginning to its end; `sagas` has the number that each has come to."""
        saga, n, seq = entry.get("saga", ""), entry.get("n", 0), entry["seq"]
        before = sagas.get(saga, 0)
        if n != before + 1:
            self.find("E_ORDINAL", f"it is number {n} of saga {saga}, after number {before}", seq)
        if before < 0 or (before == 0) != (entry["kind"] == "saga.opened"):
            self.find("E_ENDED", f"saga {saga} goes on after its end, or without a beginning", seq)
        sagas[saga] = -1 if entry["ends"] else n

    def compare(self, anchors, key, size, roots, whole):
        """With signed heads that came another way; `roots` are those that are known here, by size."""
        self.level = "signed"
        for name, note in anchors:
            try:
                kept, root = head_of(note, key)
            except Bad as error:
                code = "E_IDENTITY" if error.args[0] == "E_IDENTITY" else "E_ANCHOR"
                self.find(code, f"{name}: {error.args[1]}")
                continue
            if kept in roots and roots[kept] != root:
                self.find("E_FORKED", f"{name} has another root at {kept} records")
            elif kept in roots:
                self.level = "outside anchor"
            else:
                code = "E_ROLLED_BACK" if whole and kept > size else "E_ANCHOR"
                self.find(code, f"nothing leads from {name}, over {kept} records, to the {size} here")
        if self.level == "signed":
            self.told += [f"whose log it is: compare its name, {origin_of(key)}, with what you know",
                          "that it has no second history"]  # fmt: skip
        self.told.append("that what was written is true, and that everything was written")


# ---- a disclosure ---------------------------------------------------------------------------------------------------


def disclosed(item, report, size, root):
    """The record of an item, its line, and the places of its openings that are shown."""
    if not {"line", "proof"} <= set(item) <= {"line", "proof", "open"}:
        raise ValueError("a record has other fields than line, proof and open")
    line = item["line"].encode()
    entry = record_of(line)
    if not included(leaf(line), entry["seq"], size, [hash_in(text) for text in item["proof"]], root):
        report.find("E_PROOF", "its proof does not lead to the signed root", entry["seq"])
    shown, c = [], entry.get("c", [])
    for opening in item.get("open", ()):
        hash = sha(opening.encode()).hex()
        if hash not in c or not opens(opening.encode(), hash):
            report.find("E_OPENING", "an opening is not what the record commits to", entry["seq"])
        shown += [(entry["seq"], c.index(hash))] if hash in c else []
    if shown != sorted(set(shown)):
        report.find("E_OPENING_EXTRA", "openings are not in order, or one is there twice", entry["seq"])
    return entry, line, shown


def hash_in(text):
    if len(unbase64(text)) != 32:
        raise ValueError("a hash has 32 bytes")
    return unbase64(text)


def check_disclosure(text, anchors, report):
    try:
        plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")  # a quote is the end of a string now
        values = (1 for found in re.finditer(rb'"[^"]*"?|[\[{,]', plain) if found.group()[:1] != b'"')
        if next(itertools.islice(values, VALUES, None), None):
            raise ValueError("it has more values than a disclosure can have")
        document = loads(text.decode())
        must, may = {"format", "checkpoint", "saga", "genesis", "entries"}, {"beside", "consistency"}
        if not must <= set(document) <= must | may or document["format"] != "amends/disclosure/1":
            raise ValueError("its fields are not those of amends/disclosure/1")
        _disclosure(document, anchors, report)
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError) as error:
        raise Bad("E_DISCLOSURE", f"this is no disclosure ({error!r})") from None


def _disclosure(document, anchors, report):
    _, key = key_in(document["genesis"]["line"].encode())
    size, root = head_of(document["checkpoint"].encode(), key)
    disclosed(document["genesis"], report, size, root)
    entries = [disclosed(item, report, size, root) for item in document["entries"]]
    beside = [disclosed(item, report, size, root) for item in document.get("beside", ())]
    for row in (entries, beside):
        seqs = [entry["seq"] for entry, _, _ in row]
        if seqs != sorted(set(seqs)) or 0 in seqs:
            report.find("E_ORDER", "records are not in order, or one is there twice")
    both = sorted(entries + beside, key=lambda row: row[0]["seq"])
    for i in range(1, len(both)):
        report.follows(*both[i - 1][:2], both[i][0])
    sagas, asked = {}, document["saga"].encode().decode()  # not half a character
    for entry, _, _ in entries:
        report.counts(sagas, entry)
    for entry, _, _ in entries:
        if entry["kind"] == "saga.opened" and entry["saga"] != asked and not entry["near"] & set(sagas):
            report.find("E_REF", f"saga {entry['saga']} does not belong to the one that was asked for")
    if asked not in sagas or set(sagas.values()) != {-1}:
        report.find("E_ENDED", "the end of a saga is withheld, or all of it")
    shown = {place for _, _, places in both for place in places}
    every = {(entry["seq"], place) for entry, _, _ in both for place in range(len(entry.get("c", ())))}
    for entry, _, _ in beside:
        fits = {"saga.opened": entry["near"] & set(sagas) and entry.get("saga") not in sagas,
                "vote.cast": entry.get("of") in sagas, "redaction.made": every & entry["places"],
                "seal.forgotten": entry.get("target") in sagas}.get(entry["kind"])  # fmt: skip
        if not fits:
            report.find("E_REF", f"{entry['kind']} is about nothing that is disclosed", entry["seq"])
        if entry["kind"] == "redaction.made" and shown & entry["places"]:
            report.find("E_REDACT_INCOMPLETE", "an opening is here that it says was destroyed", entry["seq"])
    roots = {size: root}
    if document.get("consistency") is not None:
        old, old_root = head_of(document["consistency"].pop("note").encode(), key)
        proof = [hash_in(text) for text in document["consistency"].pop("proof")]
        if document["consistency"] or not grown(old, size, old_root, root, proof):
            report.find("E_FORKED" if old == size else "E_PROOF", "the older head is not the beginning of this one")
        roots.setdefault(old, old_root)
    report.summary = (
        f"saga {asked}: {len(entries)} records, {len(shown)} of {len(every)} openings shown; under a head of "
    )
    report.summary += f"{size} records, root {root.hex()}"
    report.told.append("that no other saga belongs to this one, and that all votes on it are here")
    report.compare(anchors, key, size, roots, whole=False)


# ---- a bundle -------------------------------------------------------------------------------------------------------


def listed(folder, report, signer):
    """SHA256SUMS names every file and its hash, and the device's export key signed it in the form of two tools."""
    sums = whole(folder, "SHA256SUMS", LIST)
    names = {name: hash for hash, name in re.findall("([0-9a-f]{64})  ([0-9A-Za-z._/-]+)\n", sums.decode())}
    there = {}
    for above, folders, files in os.walk(folder):
        for name in files + [name for name in folders if os.path.islink(os.path.join(above, name))]:
            path = os.path.join(above, name)
            there[os.path.relpath(path, folder).replace(os.sep, "/")] = path
    beside = {"SHA256SUMS", "SHA256SUMS.sig", "SHA256SUMS.minisig"}
    if set(there) != set(names) | beside or sums.count(b"\n") != len(names):
        report.find("E_BUNDLE", f"not the files that SHA256SUMS lists: {sorted(set(there) ^ set(names) ^ beside)[:5]}")
    for name in set(there) & set(names):
        if hash_of(folder, name) != names[name]:
            report.find("E_BUNDLE", f"{name} is not the file that SHA256SUMS lists")
    try:
        signify = whole(folder, "SHA256SUMS.sig", LINE).decode().split("\n")
        minisign = whole(folder, "SHA256SUMS.minisig", LINE).decode().split("\n")
        first, comment = unbase64(minisign[1])[10:], minisign[2][len("trusted comment: ") :].encode()
        want(ed25519(signer, sums, unbase64(signify[1])[10:]))
        want(ed25519(signer, hashlib.blake2b(sums).digest(), first))
        want(ed25519(signer, first + comment, unbase64(minisign[3])))
    except (OSError, KeyError, ValueError, IndexError):
        report.find("E_SIGNATURE", "SHA256SUMS is not signed by the export key that record 0 names")


def hash_of(folder, name):
    """SHA-256 of a file in hex; None for what is no file."""
    digest = hashlib.sha256()
    try:
        with opened(folder, name) as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
    except OSError:
        return None
    return digest.hexdigest()


def lines_of(folder, row, most):
    """The lines of a row of files, such as entries/000000.ndjson, entries/000001.ndjson …"""
    number = 0
    while os.path.lexists(os.path.join(folder, row % number)):
        yield from lines_in(folder, row % number, most)
        number += 1


def openings_of(folder, payload):
    """(seq, place, line; None for a sealed one) of each opening that came along, in order."""
    if payload == "plain":
        places = lines_of(folder, "openings/%06d.tsv", 64)
        for place, line in zip(places, lines_of(folder, "openings/%06d.ndjson", OPENING)):  # noqa: B905
            seq, place = place.split(b"\t")
            yield int(seq), int(place), line
    for line in lines_of(folder, "openings.sealed/%06d.ndjson", 2 * OPENING) if payload == "sealed" else ():
        yield (*json.loads(line)[:2], None)


class Walk:
    """One pass over records and the stubs of removed ones; `sizes` are those at which the root is asked for."""

    def __init__(self, folder, report, payload, sizes):
        self.report, self.sizes, self.tree, self.roots = report, sizes, Tree(), {}
        self.sagas, self.gaps, self.runs, self.forgotten = {}, [], [], set()
        self.redacted, self.missing, self.shown = set(), {}, set()
        self.openings = openings_of(folder, payload) if payload != "none" else None
        self.next = next(self.openings, None) if self.openings else None
        stubs = (line.decode().split("\t") for line in lines_in(folder, "stubs.tsv", 200))
        stubs = ((int(start), int(level), bytes.fromhex(hash)) for start, level, hash in stubs)
        before, stub = None, next(stubs, None)
        for line in lines_of(folder, "entries/%06d.ndjson", LINE):
            entry = record_of(line)
            while stub and stub[0] < entry["seq"]:
                self.removed(*stub)
                stub = next(stubs, None)
            if entry["seq"] != self.tree.size:
                raise Bad("E_GAP", f"record {entry['seq']} stands where record {self.tree.size} is to come")
            if before:
                report.follows(*before, entry)
            before = entry, line
            self.record(entry, leaf(line))
        while stub:
            self.removed(*stub)
            stub = next(stubs, None)
        self.explained()

    def grow(self, level, hash):
        self.tree.append(level, hash)
        if self.tree.size in self.sizes:
            self.roots[self.tree.size] = self.tree.root()

    def removed(self, start, level, hash):
        if start != self.tree.size or start % (1 << level) or len(hash) != 32:
            raise Bad("E_STUB", f"a stub of record {start} stands where record {self.tree.size} is to come")
        self.grow(level, hash)
        self.gaps.append((start, self.tree.size))

    def record(self, entry, hash):
        seq, kind = entry["seq"], entry["kind"]
        self.grow(0, hash)
        if (kind == "log.opened") != (seq == 0) or (seq == 0 and entry["prev"] != "0" * 64):
            self.report.find("E_GENESIS", "a genesis is the first record and no other", seq)
        if "saga" in entry:
            self.report.counts(self.sagas, entry)
        if self.openings:
            self.take_openings(seq, entry.get("saga"), entry.get("c", []))
        if any(stop > seq for _, stop in entry["runs"]) or any(place[0] >= seq for place in entry["places"]):
            self.report.find("E_REF", "it names records that are not before it", seq)
        self.runs += entry["runs"] if kind == "compaction.made" else []
        self.redacted |= entry["places"] if kind == "redaction.made" else set()
        self.forgotten |= {entry.get("target")} if kind == "seal.forgotten" else set()
        self.forgotten -= {entry.get("saga")} if kind == "saga.opened" else set()  # another one, under its id

    def take_openings(self, seq, saga, c):
        missing = dict.fromkeys(((seq, place) for place in range(len(c))), saga)
        while self.next and self.next[0] <= seq:
            at, place, line = self.next
            if missing.pop((at, place), self) is self or (line is not None and not opens(line, c[place])):
                self.report.find("E_OPENING", "an opening is not what the record commits to", at)
            self.shown.add((at, place))
            self.next = next(self.openings, None)
        self.missing.update(missing)

    def explained(self):
        """Gaps are what compactions name; missing openings are what redactions name, or of a forgotten saga."""
        find = self.report.find
        if joined(self.runs) != joined(self.gaps):
            find("E_GAP", f"missing are {joined(self.gaps)[:5]}, and compactions name {joined(self.runs)[:5]}")
        if self.next:
            find("E_OPENING_EXTRA", f"an opening of record {self.next[0]} stands where none is to come")
        for place, saga in self.missing.items():
            if place not in self.redacted and (saga is None or saga not in self.forgotten):
                find("E_OPENING_MISSING", "an opening is gone and no record says why", place[0])
        if self.shown & self.redacted:
            find("E_REDACT_INCOMPLETE", "openings are here that a record says were destroyed")


def joined(spans):
    """Runs that touch as one; overlapping ones stay apart, so that they equal nothing."""
    out = []
    for first, stop in sorted(spans):
        out.append((out.pop()[0], stop) if out and out[-1][1] == first else (first, stop))
    return out


def check_bundle(folder, anchors, report):
    try:
        manifest = loads(whole(folder, "manifest.json", MANIFEST).decode())
        if manifest["format"] != "amends/bundle/1":
            raise Bad("E_VERSION", "its format is not amends/bundle/1")
        _bundle(folder, manifest, anchors, report)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise Bad("E_BUNDLE", f"this bundle cannot be read ({error!r})") from None


def _bundle(folder, manifest, anchors, report):
    genesis, key = key_in(next(lines_of(folder, "entries/%06d.ndjson", LINE), b""))
    listed(folder, report, bytes.fromhex(genesis["export"]))
    if manifest["verdict"] != "INTACT":
        report.find("E_BUNDLE", "it was exported though it did not verify")
    more = os.path.join(folder, "checkpoints")
    heads = {}
    for name in ["checkpoint", *(f"checkpoints/{size}" for size in (os.listdir(more) if os.path.isdir(more) else ()))]:
        heads[name] = head_of(whole(folder, name, LIST), key)
        if name not in ("checkpoint", f"checkpoints/{heads[name][0]}"):
            report.find("E_ROOT", f"{name} is no head of this size")
    sizes = {size for size, _ in heads.values()}
    sizes |= {int(size) for _, note in anchors for size in re.findall(rb"\A[^\n]*\n([0-9]{1,16})\n", note)}
    walk = Walk(folder, report, manifest["payload"], sizes)
    size, root = walk.tree.size, walk.tree.root()
    for name, (at, signed) in heads.items():
        if walk.roots.get(at) != signed:
            report.find("E_ROOT", f"{name}: the records are not the first {at} that were signed")
    if heads["checkpoint"] != (size, root) or (manifest["size"], manifest["root"]) != (size, root.hex()):
        report.find("E_ROOT", "the head in the bundle is not that of its records")
    removed = sum(stop - first for first, stop in walk.gaps)
    report.summary = f"{size} records, {removed} of them removed, {len(walk.shown)} openings; root {root.hex()}"
    if manifest["payload"] != "plain":
        report.told.append("what the records hold: their openings are not here, or sealed")
    report.told.append("that tile/ and the certificate fit the records: they were compared with SHA256SUMS only")
    report.compare(anchors, key, size, walk.roots, whole=True)


# ---- the command line -----------------------------------------------------------------------------------------------


def main(words):
    path, *more = words or [""]
    if not path or path.startswith("-") or more[::2] != ["--anchor"] * (len(more) - len(more) // 2) or len(more) % 2:
        print(__doc__)
        return 2
    report = Report()
    try:
        anchors = [(name, open(name, "rb").read(1 << 20)) for name in more[1::2]]  # noqa: SIM115
        if os.path.isdir(path):
            check_bundle(path, anchors, report)
        else:
            with open(path, "rb") as file:
                check_disclosure(limited(file, path, FILE), anchors, report)
    except (OSError, ValueError) as error:
        say(f"cannot be read: {error}")
        return 2
    except Bad as error:
        report.find(*error.args)
    return report.says()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
