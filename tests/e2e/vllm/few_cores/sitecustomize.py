"""Loaded by every Python process of an engine under test: keeps others' busy waiting off two cores.

FEW_CORES_YIELD_S   sleep so long in place of os.sched_yield, on which vLLM's queues between an engine and its
                    tensor-parallel workers spin for a second after every message
FEW_CORES_NIXL_US   pause of NIXL's progress thread; NIXL's Python API has none, which takes one core for each agent.
                    Also leaves the thread that registers NIXL on its core: vLLM would move it, in every engine
                    alike, to the machine's last one
"""

import os
import time

if "FEW_CORES_YIELD_S" in os.environ:
    pause_s = float(os.environ["FEW_CORES_YIELD_S"])
    os.sched_yield = lambda: time.sleep(pause_s)

if "FEW_CORES_NIXL_US" in os.environ:
    from nixl_cu13 import _bindings

    os.sched_setaffinity = lambda process, cores: None
    make_agent = _bindings.nixlAgent

    def make_patient_agent(name, config):
        config.pthrDelay = int(os.environ["FEW_CORES_NIXL_US"])
        return make_agent(name, config)

    _bindings.nixlAgent = make_patient_agent
