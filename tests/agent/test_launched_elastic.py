# SPDX-License-Identifier: Apache-2.0
"""Scripts under torch's elastic agent: variables, restarts, and what they leave."""

from __future__ import annotations

from dataclasses import replace

from millpond.train.distributed.launch_messages import ElasticAgents, RestartScript

from .launched_rig import Agent, agent, output, said, script, soon

__all__ = ["agent"]

LOOPBACK = (("GLOO_SOCKET_IFNAME", "lo"),)

TELLS = """\
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
names = ["RANK", "WORLD_SIZE", "GROUP_RANK", "ROLE_NAME"]
names += [f"TORCHELASTIC_{name}" for name in ("RESTART_COUNT", "MAX_RESTARTS", "RUN_ID")]
print(total.item(), *(os.environ[name] for name in names), flush=True)
dist.destroy_process_group()
sys.exit(7 if os.environ["TORCHELASTIC_RESTART_COUNT"] != sys.argv[1] else 0)
"""


def run(agent: Agent, until: str, restarts: int) -> tuple[list[str], list[str], int]:
    """Run the script TELLS, which fails ``until`` a restart, on one worker. Returns what each of its starts
    has told, all lines, and its exit code.
    """
    elastic = ElasticAgents(1, 1, restarts)
    launch = replace(script(TELLS), arguments=(until,), elastic=elastic, run="r", variables=LOOPBACK)
    host, thread = agent.serve(launch)
    with host:
        lines, code = said(host)
    thread.join(30)
    return [line for line in lines if line.startswith("1.0")], lines, code


def test_a_script_that_fails_is_started_again(agent: Agent) -> None:
    told, lines, code = run(agent, "1", 2)
    assert (told, code) == (["1.0 0 1 0 default 0 2 r", "1.0 0 1 0 default 1 2 r"], 0), lines


def test_its_exit_code_is_the_scripts_after_the_last_restart(agent: Agent) -> None:
    told, lines, code = run(agent, "9", 1)
    assert ([line.split()[5] for line in told], code) == (["0", "1"], 7), lines


def test_it_is_started_again_when_another_worker_is_lost(agent: Agent) -> None:
    code = "import os, time\nprint(os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
    code += "time.sleep(600 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)\n"
    host, thread = agent.serve(replace(script(code), elastic=ElasticAgents(1, 1, 1), run="r"))
    with host:
        assert output(host) == ("0",)
        host.send(RestartScript(), soon())
        lines, ended = said(host)
    assert (lines[-1], ended) == ("1", 0), lines
    thread.join(30)
