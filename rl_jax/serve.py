"""Serve a policy over HTTP: python -m rl_jax.serve --policy RUN_OR_CHECKPOINT_OR_HF_DIR [--config FILE].

The embedded sampler behind vLLM's token-in/token-out route and the OpenAI chat and completions routes (rl_jax/http).
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from rl_jax import cli, rooms
from rl_jax.http.server import serve
from rl_jax.mesh import MeshConfig, make_mesh


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and serve until interrupted; returns the exit code."""
    args = cli.parser("serve", "Serve a policy over HTTP with the embedded sampler.")
    args.add_argument("--policy", metavar="DIR", help="run folder, checkpoint, or Hugging Face directory")
    return cli.run_entry(_run, cli.arguments(args, argv))


def _run(args: argparse.Namespace) -> int:
    config, policy = cli.load_policy_config(args)
    if args.dry_run:
        cli.print_plan(config, [f"would serve {policy} at http://{config.serve.host}:{config.serve.port}"])
        return 0
    arch, params, version = rooms.load_policy(policy, make_mesh(MeshConfig()))
    cli.check(config, arch, "serve")
    tokenizer = rooms.load_tokenizer(config, arch, rooms.tokenizer_dir(policy))
    sampler = rooms.make_sampler(config, arch, tokenizer, params, version)
    del params  # the sampler has its own copy
    try:
        asyncio.run(serve(sampler, tokenizer, config.serve, max_len=config.sampler.max_len, vocab_size=arch.vocab_size))
    except KeyboardInterrupt:
        return 0
    finally:
        asyncio.run(sampler.close())
    return 0


if __name__ == "__main__":
    sys.exit(main())
