"""A tokenising process: both ends of its pipe.

It is started as a program of its own, so it does not import the caller's main module as multiprocessing would, and
it hides torch from transformers, which then loads in two seconds. It ends when its input does, also when its parent was
killed. Messages are pickles with their length in front, from one of our processes to another.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from harvest.dataset import RecordBatch
from harvest.encoding import Encoder, EncoderSettings, TokenizedBatch
from harvest.errors import HarvestError, RunError
from harvest.tokenizer import TokenizerInfo

_LENGTH = struct.Struct("<Q")
_PROGRAM = "from harvest.tokenization_worker import serve; serve()"
_END_TIMEOUT_S = 10


class WorkerProcess:
    """The parent's end of one tokenising process. For one thread at a time."""

    def __init__(self, settings: EncoderSettings, *, parallel: bool) -> None:
        """Start the process; it loads its tokenizer while the caller goes on.

        Args:
            settings: what it encodes.
            parallel: let the tokenizer use all cores by threads of its own.
        """
        packages = str(Path(__file__).resolve().parent.parent)
        paths = [packages, os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "TOKENIZERS_PARALLELISM": "true" if parallel else "false",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._send(settings)

    @cached_property
    def info(self) -> TokenizerInfo:
        """The tokenizer, once it is loaded.

        Raises:
            ConfigError: it cannot be loaded.
            RunError: the process died.
        """
        info = self._receive()
        assert isinstance(info, TokenizerInfo)
        return info

    def encode(self, batch: RecordBatch) -> TokenizedBatch:
        """As `Encoder.encode`, over there."""
        _ = self.info
        self._send(batch)
        encoded = self._receive()
        assert isinstance(encoded, TokenizedBatch)
        return encoded

    def close(self) -> None:
        """End the process; also while another thread waits for it."""
        self._process.kill()
        self._process.wait(_END_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                pipe.close()  # type: ignore[union-attr]
            except OSError:
                continue  # the rest of a message to a process that is gone

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        try:
            _write(self._process.stdin, message)
        except OSError as error:
            raise self._died() from error

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        try:
            answer = _read(self._process.stdout)
        except EOFError:
            raise self._died() from None
        if isinstance(answer, HarvestError):
            raise answer
        return answer

    def _died(self) -> RunError:
        code = self._process.wait(_END_TIMEOUT_S)
        return RunError(
            f"a tokenising process ended with exit code {code} (its messages are above; -9 is most often a lack of "
            "memory): the same command starts anew; tokenization.processes = 1 needs the least memory"
        )


def serve() -> None:
    """The child's end: read settings, answer with the tokenizer's info, then a batch for a batch."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    source = os.fdopen(os.dup(0), "rb")
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not end up among the messages
    settings: EncoderSettings = _read(source)
    if not settings.tokenizer.trust_remote_code:
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    try:
        encoder = Encoder(settings)
        _write(target, encoder.info)
        while True:
            _write(target, encoder.encode(_read(source)))
    except HarvestError as error:
        _write(target, error)
    except (EOFError, BrokenPipeError):
        return


def _write(stream: IO[bytes], message: object) -> None:
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(_LENGTH.pack(len(content)))
    stream.write(content)
    stream.flush()


def _read(stream: IO[bytes]) -> Any:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (n_bytes,) = _LENGTH.unpack(head)
    content = stream.read(n_bytes)
    if len(content) < n_bytes:
        raise EOFError
    return pickle.loads(content)
