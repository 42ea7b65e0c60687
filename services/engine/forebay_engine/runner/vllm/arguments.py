"""The arguments that a model specification means for vLLM."""

import json

from forebay.engine.v1 import engine_service_pb2 as pb

_DTYPES = {pb.PRECISION_FP16: "float16", pb.PRECISION_BF16: "bfloat16"}

# vLLM reads these when it is imported.
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # The tracker cleans up behind engines that end with their runner, and need not say so.
    "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
    # A listed host of media must not lead elsewhere.
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
    # OpenAI's own limit; vLLM's default of 16384 would let one request fill the engine.
    "VLLM_MAX_N_SEQUENCES": "128",
}

# vLLM's engine processes read these when they start.
CPU_ENVIRONMENT = {
    # Log-probabilities compile a kernel on first use, which would hold every request for 20 s.
    "TORCHDYNAMO_DISABLE": "1",
}

CACHE_MESSAGES_MAX = 10_000
"""So many events of the prefix cache wait at either end; then some are lost."""
_CACHE_EVENTS = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "hwm": CACHE_MESSAGES_MAX,
    # Nobody asks for old ones again.
    "buffer_steps": 1,
}


def vllm_arguments(
    spec: pb.ModelSpec, *, on_cpu: bool, kv_cache_bytes: int, cache_endpoint: str = ""
) -> list[str]:
    """Return the command line of vLLM's OpenAI server for a specification.

    `cache_endpoint` is where events of the prefix cache go, as ZMQ names it; empty: nowhere.
    """
    arguments = [
        *("--model", spec.artifact_path),
        *("--served-model-name", spec.model_version),
        *("--load-format", "safetensors"),
        *("--tensor-parallel-size", str(max(1, spec.tensor_parallel))),
        *("--dtype", _DTYPES.get(spec.precision, "auto")),
        "--enable-prompt-tokens-details",
        "--disable-fastapi-docs",
    ]
    if spec.context_tokens:
        arguments += ["--max-model-len", str(spec.context_tokens)]
    if spec.max_sequences:
        arguments += ["--max-num-seqs", str(spec.max_sequences)]
    cache_bytes = spec.kv_cache_bytes or (kv_cache_bytes if on_cpu else 0)
    if cache_bytes:
        arguments += ["--kv-cache-memory-bytes", str(cache_bytes)]
    if on_cpu:
        # vLLM's blocks of 128 tokens on a CPU would find no system prompt of ordinary length again.
        arguments += ["--enforce-eager", "--block-size", "32"]
    else:
        arguments.append("--enable-sleep-mode")
    if spec.task == pb.TASK_EMBED:
        # An encoder has no KV cache to look a prefix up in.
        arguments += ["--runner", "pooling", "--no-enable-prefix-caching"]
    else:
        arguments.append("--enable-prefix-caching")
        if cache_endpoint:
            events = {**_CACHE_EVENTS, "endpoint": cache_endpoint}
            arguments += ["--kv-events-config", json.dumps(events)]
        # The Hermes form is what most open chat models are trained on, and the parser leaves
        # answers without tool calls as they are.
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    return arguments
