"""README.txt of a bundle: what lies there, what to type to check it with other people's tools, and what that shows.

Its commands are run as they stand by tests/test_strangers.py. What a command does not prove is said as plainly as what
it does: that files agree with each other says nothing about who made them.
"""

from __future__ import annotations

from .evidence import NONE, PLAIN, SEALED

_README = """\
A bundle of the log @ORIGIN@
@WHAT@

Each record is one line of entries/*.ndjson. A line names the hash of the line before it (`prev`), and all of them are
the leaves of one tree, whose root the device has signed (`checkpoint`, a C2SP signed note). Hash of a line, leaf of the
tree: SHA-256 of a zero byte and the line with its line feed. Inner node: SHA-256 of 01, left, right (RFC 6962).
What was business data stands in an opening, a line of its own; its SHA-256 stands in `c` of its record.
@OPENINGS@

Below: what to type in this folder, in bash with GNU coreutils. Every block ends with exit status 0 if it found nothing.

1. Every file is as listed, and no other file is here (sha256sum):

    sha256sum -c --quiet SHA256SUMS
    t=$(mktemp -d); cut -c67- SHA256SUMS | LC_ALL=C sort > $t/listed
    find . ! -type d ! -name 'SHA256SUMS*' | cut -c3- | LC_ALL=C sort | diff $t/listed -

2. The whole chain: each line names the hash of the line before it. Where records were removed, the chain goes on after
the gap (sha256sum; seconds for 100,000 records):

    t=$(mktemp -d)
    for e in entries/*.ndjson; do mkdir $t/d; sed 's/^/\\x00/' $e | split -l 1 -a 7 -d - $t/d/;
      (cd $t/d; find . -type f -print0 | sort -z | xargs -0 sha256sum | cut -c-64) >> $t/hash; rm -r $t/d; done
    sed 's/^{"seq":\\([0-9]*\\),"prev":"\\([0-9a-f]*\\)".*/\\1 \\2/' entries/*.ndjson > $t/named
    paste -d' ' $t/named $t/hash | awk 'NR > 1 && $1 == s + 1 && $2 != h || NR == 1 && $2 ~ /[^0]/ {
      print "broken before", $1; b = 1 } NR > 1 && $1 <= s { print "out of order:", $1; b = 1 }
      { s = $1; h = $3 } END { exit b }'
@SIGNED@
@BROKEN@
What this proves, and what it does not. sha256sum shows that the files and the chain agree with each other; it does NOT
show who made them, nor that nothing was cut off: whoever made the folder can make all of that anew. The signatures show
that it was made by who holds the keys; that these are the keys of the device that you mean, only you can know: compare
the log's name,
@ORIGIN@
with one that you got another way. That nothing was cut off or rewritten, show to yourself with an older `checkpoint`
that you kept: its size and root must be those of the same tree. Nothing can show that what was written is true, nor
that everything was written.
"""

_SIGNED = """
3. The root was signed by the device (openssl 3):

    t=$(mktemp -d); head -n 3 checkpoint > $t/body
    sed -n 5p checkpoint | cut -d' ' -f3 | base64 -d | tail -c 64 > $t/sig
    openssl pkeyutl -verify -pubin -inkey keys/device.pem -rawin -in $t/body -sigfile $t/sig

4. The log is named after that key (openssl):

    name=$(openssl pkey -pubin -in keys/device.pem -outform DER | tail -c 32 | openssl dgst -sha256 -binary | base32)
    test "$(head -n 1 checkpoint)" = "amends.local/$(echo $name | cut -c-26 | tr A-Z a-z)"

5. The list of files was signed by the device's export key, which record 0 names (signify, on Debian signify-openbsd):

    signify=$(command -v signify-openbsd || command -v signify)
    $signify -V -q -p keys/signify.pub -x SHA256SUMS.sig -m SHA256SUMS
    head -n 1 entries/000000.ndjson | grep -q "\\"export\\":\\"$(tail -n 1 keys/signify.pub | base64 -d | tail -c 32 |
      od -An -v -tx1 | tr -d ' \\n')\\""

6. The same (minisign):

    minisign -Vq -m SHA256SUMS -p keys/minisign.pub

7. A record stands in the tree under the signed root, here the last one (tlog-tiles, of the Python package tlog-scales;
any tool for C2SP tlog-tiles will do). Tiles that would need the hash of a removed record are not here:

    tlog-tiles get-leaf -c ./ -1 > $(mktemp -d)/line

8. Everything at once, with Python alone, and with amends:

    python3 check_amends.py .

    amends verify .
"""

_OPENING = """
An opening is what its record committed to (line 1 of openings/000000.ndjson; its place in the log is in line 1 of the
.tsv beside it):

    grep -q "$(head -n 1 openings/000000.ndjson | sha256sum | cut -c-64)" entries/000000.ndjson
"""

_BROKEN = """
THIS LOG DID NOT VERIFY when it was copied: @VERDICT@. The findings are in manifest.json. The records are as they lay
there, no signature was made over them, and no certificate; some of the checks will fail, and should.
"""

_CARRIED = {
    NONE: "This bundle has none of them.",
    PLAIN: "They are in openings/, as far as they were not destroyed.",
    SEALED: "They are in openings.sealed/, encrypted under a key that is not here.",
}


def readme(
    origin: str, format: str, tool: str, verdict: str, payload: str, counts: dict[str, int], broken: bool
) -> bytes:
    """The text for a bundle; counts as in its manifest, broken: of a log that did not verify."""
    what = f"{counts['entries']} records" + (
        f", and the hashes of {counts['removed']} removed ones" * bool(counts["removed"])
    )
    opening = _OPENING if payload == PLAIN and counts["openings"] else ""
    text = _README.replace("@SIGNED@", "" if broken else _SIGNED).replace("@BROKEN@", _BROKEN if broken else opening)
    words = {"WHAT": f"{what}; format {format}, made by {tool}.", "ORIGIN": origin}
    words |= {"OPENINGS": _CARRIED[payload], "VERDICT": verdict}
    for word, said in words.items():
        text = text.replace(f"@{word}@", said)
    return text.encode()
