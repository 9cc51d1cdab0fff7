"""Text to token ids: one token per byte, or a Hugging Face tokenizer.

transformers takes seconds to import, so `load_tokenizer` imports it only for names other than `bytes`. Torch is not
needed.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import tokenize
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lengthwise.core.errors import ConfigError
from lengthwise.core.hub_access import only_cached, why_only_cached
from lengthwise.core.names import BYTES_TOKENIZER, NO_TEMPLATE
from lengthwise.data.dataset import NO_LOSS
from lengthwise.data.digests import file_digest
from lengthwise.data.image_files import ImageFile, ImageProcessor, processor_files
from lengthwise.data.masked import encode_chat, encode_pair, ends_of_turns, refuse_twice
from lengthwise.data.messages import Chat

# Arguments of a tokenizer of transformers that change no ids of a text: where it is, and what is done to ids
_NO_RULES = ("name_or_path", "is_local", "local_files_only", "processor_class", "chat_template", "model_max_length")
_NO_RULES += ("padding_side", "truncation_side", "clean_up_tokenization_spaces")
_OF_PROCESSOR = "chat_template.json"  # has the template of some models with images, whose tokenizers have none


class Tokenizer(Protocol):
    """What the data half needs of a tokenizer. Encoders return int32 [tokens]; ValueError if a text has no encoding."""

    @property
    def name(self) -> str:
        """Name of the tokenizer in the run file."""
        ...

    @property
    def eos_id(self) -> int | None:
        """Id that ends every text, or None."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Encode one document."""
        ...

    def encode_python(self, source: bytes) -> np.ndarray:
        """Encode a Python file as it lies on disk, in whatever encoding it declares."""
        ...

    def encode_pair(self, prompt: str, completion: str) -> tuple[np.ndarray, np.ndarray]:
        """Encode a prompt and its completion; return ids, and labels with a loss on the completion alone."""
        ...

    def encode_chat(self, chat: Chat, images: Sequence[ImageFile] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Encode a chat by the chat template; return ids, and labels with a loss on assistants' turns alone."""
        ...

    @property
    def images(self) -> ImageProcessor:
        """The image processor of the same model; ValueError without one."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids, int32 [tokens], for reading: with special tokens, unknown ids as `<300>`."""
        ...

    def digest(self) -> str:
        """Return 64 hexadecimal digits that differ if a text may be encoded differently."""
        ...

    def template_digest(self) -> str:
        """Return 64 hexadecimal digits that differ if the chat template does."""
        ...

    def special_ids(self) -> dict[str, list[int]]:
        """Return special ids by keys of a model's config; `eos_token_id` ends texts and an assistant's turns."""
        ...

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files, if it has any, beside a saved model."""


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """One byte of UTF-8 is one token; 256 of them, no EOS."""

    name: str = BYTES_TOKENIZER
    eos_id: int | None = None

    def encode(self, text: str) -> np.ndarray:
        return self.encode_python(text.encode("utf-8"))

    def encode_python(self, source: bytes) -> np.ndarray:
        return np.frombuffer(source, dtype=np.uint8).astype(np.int32)

    def encode_pair(self, prompt: str, completion: str) -> tuple[np.ndarray, np.ndarray]:
        first, second = self.encode(prompt), self.encode(completion)
        return np.concatenate([first, second]), np.concatenate([np.full_like(first, NO_LOSS), second])

    def encode_chat(self, chat: Chat, images: Sequence[ImageFile] = ()) -> tuple[np.ndarray, np.ndarray]:
        del chat, images
        raise ValueError(f"tokenizer bytes, {NO_TEMPLATE}")

    @property
    def images(self) -> ImageProcessor:
        raise ValueError(f"tokenizer bytes, {NO_TEMPLATE}")

    def decode(self, ids: np.ndarray) -> str:
        return "".join(
            bytes(some).decode("utf-8", "backslashreplace") if is_known else _as_numbers(some)
            for is_known, some in groupby(ids.tolist(), key=lambda each: each < 256)
        )

    def digest(self) -> str:
        return _digest(self.name)

    def template_digest(self) -> str:
        return _digest(None)

    def special_ids(self) -> dict[str, list[int]]:
        return {}

    def save(self, folder: Path) -> None:
        """Write nothing: bytes need no files."""


@dataclass(frozen=True, slots=True)
class HuggingFaceTokenizer:
    """A tokenizer of transformers with its own special tokens; EOS is added if the encoding lacks it."""

    name: str
    eos_id: int | None
    tokenizer: Any
    noted: set[str] = field(default_factory=set, compare=False, repr=False)
    """Omissions of templates that it has warned of."""
    processors: list[ImageProcessor] = field(default_factory=list, compare=False, repr=False)
    """The image processor, once it is loaded."""

    @property
    def images(self) -> ImageProcessor:
        if not self.processors:
            self.processors.append(ImageProcessor(self.name, self.tokenizer))
        return self.processors[0]

    def encode(self, text: str) -> np.ndarray:
        """Encode with the tokenizer's special tokens, EOS last; ValueError also for a text that repeats one of them."""
        text.encode("utf-8")  # raises for a lone surrogate, before the tokenizer's own error
        ids = self.tokenizer(text, verbose=False)["input_ids"]
        refuse_twice(self.tokenizer, ids)
        if self.eos_id is not None and (not ids or ids[-1] != self.eos_id):
            ids = [*ids, self.eos_id]
        return np.array(ids, dtype=np.int32)

    def encode_python(self, source: bytes) -> np.ndarray:
        """Decode as Python would, with line ends kept, then encode."""
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        except SyntaxError as error:
            raise ValueError(str(error)) from None
        return self.encode(source.decode(encoding))

    def encode_pair(self, prompt: str, completion: str) -> tuple[np.ndarray, np.ndarray]:
        return encode_pair(self.tokenizer, prompt, completion)

    def encode_chat(self, chat: Chat, images: Sequence[ImageFile] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Encode a chat by the tokenizer's template (`masked.encode_chat`); warn once of each kind of omission."""

        def note(what: str, of: str) -> None:
            if what not in self.noted:
                self.noted.add(what)
                left_out = f"the chat template of {self.name} leaves out {what} ({of})"
                warnings.warn(f"{chat.where}: {left_out}: none of it is trained on, nor of others alike", stacklevel=2)

        if not images:
            return encode_chat(self.tokenizer, chat, note)
        return self.images.expanded(*encode_chat(self.tokenizer, chat, note, self.images.cut.rewrite), images)

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids, with special tokens; transformers drops ids that it does not have."""
        limit = len(self.tokenizer)
        return "".join(
            self.tokenizer.decode(list(some)) if is_known else _as_numbers(some)
            for is_known, some in groupby(ids.tolist(), key=lambda each: each < limit)
        )

    def digest(self) -> str:
        """Return the digest of class, vocabulary, rules, special tokens and all arguments that may change ids."""
        made: Any = self.tokenizer
        rules: dict[str, Any] = {}
        if made.is_fast:
            rules = json.loads(made.backend_tokenizer.to_str())
            rules = {key: value for key, value in rules.items() if key not in ("truncation", "padding")}  # not used
        else:
            files = (made.init_kwargs.get(name) for name in made.vocab_files_names)
            rules = {"files": [file_digest(Path(file)) for file in files if file and Path(file).is_file()]}
        special = {name: str(value) for name, value in made.special_tokens_map.items()}
        given = {
            name: str(value)
            for name, value in made.init_kwargs.items()
            if name not in (*_NO_RULES, *made.vocab_files_names) and not name.endswith("_file")
        }
        vocabulary, splits = sorted(made.get_vocab().items()), made.split_special_tokens
        return _digest([type(made).__name__, vocabulary, rules, special, given, splits, self.eos_id])

    def template_digest(self) -> str:
        template = getattr(self.tokenizer, "chat_template", None)
        sizes = processor_files(self.name) if template and "image" in str(template) else []
        return _digest([template, *sizes] if sizes else template)

    def special_ids(self) -> dict[str, list[int]]:
        made = self.tokenizer
        ends = [each for each in (self.eos_id, *ends_of_turns(made)) if each is not None]
        found = {"eos_token_id": list(dict.fromkeys(ends))}
        for key in ("bos_token_id", "pad_token_id"):
            found[key] = [getattr(made, key)] if getattr(made, key) is not None else []
        return {key: ids for key, ids in found.items() if ids}

    def save(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)


def load_tokenizer(name: str) -> Tokenizer:
    """Load `bytes`, a local Hugging Face folder, or a name on the hub; code from outside is never run.

    Raises ConfigError if it cannot be loaded.
    """
    if name == BYTES_TOKENIZER:
        return ByteTokenizer()
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise _refuse(f"transformers, to load {name}", f"no transformers ({error})") from None
    cached = only_cached(name)
    try:
        loaded: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=cached)
        vocab: dict[str, int] = loaded.get_vocab()
        if not getattr(loaded, "chat_template", None):
            for text in processor_files(name, [_OF_PROCESSOR]):
                loaded.chat_template = json.loads(text)["chat_template"]
    except Exception as error:  # files come from outside, and the Rust tokenizers raise plain Exception
        said = why_only_cached() if cached and isinstance(error, OSError) else str(error)[:300].rstrip(".")
        got = f"{name}: {said}" if cached else f"{type(error).__name__}: {said}"
        raise _refuse(f"a tokenizer at {name}", got) from error
    if not vocab:
        raise _refuse(f"a tokenizer at {name}", "an empty vocabulary")
    return HuggingFaceTokenizer(name=name, eos_id=loaded.eos_token_id, tokenizer=loaded)


@functools.cache
def tokenizer_of_process(name: str) -> Tokenizer:
    """Load a tokenizer, once per process."""
    return load_tokenizer(name)


def _as_numbers(ids: Iterable[int]) -> str:
    """Return ids without a text as `<300>`."""
    return "".join(f"<{each}>" for each in ids)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _refuse(expected: str, got: str) -> ConfigError:
    remedy = "to bytes, to a folder with tokenizer files, or to a hub name that can be reached."
    return ConfigError("tokenizer", expected=expected, got=got, remedy=f"Set {{tokenizer|`tokenizer`}} {remedy}")
