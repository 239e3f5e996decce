"""Writes docs/key_vectors.json by the program printed in docs/keys.md, which needs no library.

Run it as `python tools/key_vectors.py`.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
VECTORS = DOCS / "key_vectors.json"

Program = Callable[..., tuple[list[bytes], list[bytes]]]
Case = dict[str, Any]

LONGEST_PREIMAGE = 200
"""Bytes. Up to this length the bytes that are hashed are written out beside the key."""


def documented_program() -> Program:
    """`preimages_and_keys` of docs/keys.md."""
    page = (DOCS / "keys.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    if len(blocks) != 1:
        raise ValueError(f"docs/keys.md has {len(blocks)} python blocks: it must have one")
    scope: dict[str, Any] = {}
    exec(blocks[0], scope)
    program: Program = scope["preimages_and_keys"]
    return program


def cases() -> list[Case]:
    """The inputs of all vectors."""

    def case(
        name: str,
        token_ids: list[int],
        chunk_tokens: int,
        *extras: dict[str, Any],
        parent: bytes = bytes(32),
    ) -> Case:
        return {
            "name": name,
            "chunk_tokens": chunk_tokens,
            "parent": parent.hex(),
            "extras": list(extras),
            "token_ids": token_ids,
        }

    def lora(name: str, source: str = "") -> dict[str, Any]:
        return {"kind": "lora", "name": name, "source": source}

    def salt(salt: str) -> dict[str, Any]:
        return {"kind": "cache_salt", "salt": salt}

    def item(identifier: str, offset: int, length: int) -> dict[str, Any]:
        return {
            "kind": "multimodal_item",
            "identifier": identifier,
            "offset": offset,
            "length": length,
        }

    def embeds(content: bytes, offset: int, length: int) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        return {"kind": "prompt_embeds", "digest": digest, "offset": offset, "length": length}

    prompt = list(range(11, 20))
    drawn = random.Random(1).choices(range(128_256), k=1000)
    elsewhere = hashlib.sha256(b"another chunk").digest()
    return [
        case("the example of docs/keys.md", [11, 12, 13, 14, 15], 2,
             lora("sql"), salt("t1"), item("cat", 1, 2)),
        case("no full chunk", [1, 2, 3], 4),
        case("no token", [], 4),
        case("one token a chunk", [0, 1, 2**31, 2**32 - 1], 1),
        case("one token less than two chunks", prompt[:7], 4),
        case("two chunks", prompt[:8], 4),
        case("one token more than two chunks", prompt, 4),
        case("after a parent", prompt, 4, parent=elsewhere),
        case("a thousand tokens at 256", drawn, 256),
        case("a thousand tokens at 16", drawn, 16),
        case("adapter X", prompt, 4, lora("X")),
        case("salt X", prompt, 4, salt("X")),
        case("adapter X of source Y", prompt, 4, lora("X", "Y")),
        case("adapter XY", prompt, 4, lora("XY")),
        case("adapter and salt", prompt, 4, lora("X"), salt("Y")),
        case("adapter and salt exchanged", prompt, 4, lora("Y"), salt("X")),
        case("text that is not ASCII", prompt, 4, lora("modèle-é"), salt("租户\u0000🔑")),
        case("adapter and salt after a parent change nothing", prompt, 4,
             lora("X"), salt("Y"), parent=elsewhere),
        case("item inside the second chunk", prompt, 4, item("cat", 5, 2)),
        case("item that is the second chunk", prompt, 4, item("cat", 4, 4)),
        case("item over three chunks", prompt + prompt, 4, item("cat", 3, 6)),
        case("the same item one token later", prompt + prompt, 4, item("cat", 4, 6)),
        case("item that began before the parent's end", prompt, 4, item("cat", -3, 5),
             parent=elsewhere),
        case("item behind the last full chunk", prompt, 4, item("cat", 8, 1)),
        case("two items, two places", prompt, 4, item("cat", 0, 2), item("dog", 2, 2)),
        case("two items exchanged", prompt, 4, item("dog", 0, 2), item("cat", 2, 2)),
        case("one item twice", prompt, 4, item("cat", 0, 2), item("cat", 2, 2)),
        case("embeddings, one run", [0] * 8, 4, embeds(b"rows 0 to 7", 0, 8)),
        case("embeddings, cut where chunks end", [0] * 8, 4,
             embeds(b"rows 0 to 3", 0, 4), embeds(b"rows 4 to 7", 4, 4)),
        case("records sorted by unsigned bytes", prompt, 4,
             item("cat", 0, 128), item("cat", 0, 127)),
        case("everything at once", prompt + prompt, 4,
             embeds(b"rows", 9, 3), item("dog", 6, 5), item("cat", 1, 4),
             salt("Y"), lora("X", "Z")),
    ]  # fmt: skip


def vectors(program: Program) -> list[Case]:
    """The cases, each with its keys, and with the bytes hashed for them where these are few."""
    result = []
    for case in cases():
        preimages, keys = program(
            case["token_ids"],
            case["chunk_tokens"],
            case["extras"],
            bytes.fromhex(case["parent"]),
        )
        vector = case | {"keys": [key.hex() for key in keys]}
        if all(len(preimage) <= LONGEST_PREIMAGE for preimage in preimages):
            vector["preimages"] = [preimage.hex() for preimage in preimages]
        result.append(vector)
    return result


def document() -> str:
    """The text of docs/key_vectors.json."""
    lines = ",\n".join(json.dumps(vector) for vector in vectors(documented_program()))
    return f'{{"recipe": "docs/keys.md", "vectors": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    VECTORS.write_text(document())
    print(f"wrote {VECTORS}")
