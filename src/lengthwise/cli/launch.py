"""`lengthwise launch`: print a file that starts a run on several nodes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from lengthwise.cli.options import named_alike
from lengthwise.core.errors import Collector, ConfigError, printable
from lengthwise.core.names import counted, unknown_name
from lengthwise.core.sizes import MOST_RANKS, read_whole

if TYPE_CHECKING:
    from lengthwise.config import RunConfig

_TORCHRUN = """\
#!/bin/bash
@what@
@needs@
# Run this file on each node: the lines are the same on all, torchrun numbers the nodes.
set -eu
HEAD=${HEAD:-@head@}  # EDIT: host name or address of one node, the same on all nodes
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240  # seconds that ranks have to save after SIGTERM
@threads@
@store@
exec torchrun --nnodes @nodes@ --nproc-per-node @gpus@ --max-restarts @restarts@ \\
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:29500" --rdzv-id @name@ \\
    -m lengthwise train @run@@resume@
"""
_SLURM = """\
#!/bin/bash
@what@
@needs@
# Start it with sbatch.
#SBATCH --job-name=@name@
#SBATCH --nodes=@nodes@
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=@gpus@
#SBATCH --exclusive
#SBATCH --open-mode=append
#SBATCH --@requeue@
#SBATCH --signal=B:USR1@300
# EDIT: the time, and what your cluster asks for: --partition, --account, --mem
#SBATCH --time=24:00:00

set -eu
# EDIT: how nodes get a Python that has lengthwise, for example: source /shared/venv/bin/activate
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=29500
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240  # seconds that ranks have to save after SIGTERM
@threads_of_slurm@
@store@
stopped=0
# 300 s before the time is over: SIGTERM to the tasks; srun itself would kill them at once if it got one.
trap 'stopped=1; scancel --signal=TERM "$SLURM_JOB_ID" || true' USR1
srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --kill-on-bad-exit=0 \\
    torchrun --nnodes @nodes@ --nproc-per-node @gpus@ --max-restarts @restarts@ \\
    --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-id "$SLURM_JOB_ID" \\
    -m lengthwise train @run@@resume@ &
trainer=$!
status=0
wait "$trainer" || status=$?
if [ "$stopped" = 1 ]; then
    wait "$trainer" && exit  # the signal ended the first wait
    @again@
fi
exit "$status"
"""
_KUBERNETES = """\
@what@
@needs@
# Start it with kubectl apply -f. It needs Kubeflow's training operator (PyTorchJob of kubeflow.org/v1).
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: @name@}
spec:
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      restartPolicy: @policy@
      template: &node
        spec:
          terminationGracePeriodSeconds: 300
          containers:
            - name: pytorch  # the operator looks for this name
              image: registry.example/lengthwise:latest  # EDIT: an image with torch and lengthwise
              command: [torchrun, --nnodes, "@nodes@", --nproc-per-node, "@gpus@", --max-restarts, "@restarts@"]
              args:
                [--rdzv-backend, c10d, --rdzv-endpoint, "@name@-master-0:29500", --rdzv-id, @name@,
                 --local-addr, $(POD_IP), -m, lengthwise, train, @quoted_run@@listed_resume@]
              env:
                - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
                - {name: OMP_NUM_THREADS, value: "8"}  # EDIT: a pod's cores by its GPUs; torchrun would take 1
                - {name: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, value: "240"}  # seconds to save after SIGTERM
                - {name: TORCH_DISABLE_SHARE_RDZV_TCP_STORE, value: "1"}  # or nodes do not meet after a restart
              ports: [{name: pytorchjob-port, containerPort: 29500}]
              resources: {limits: {nvidia.com/gpu: @gpus@}}  # EDIT: add cpu and memory
              volumeMounts: [{name: shared, mountPath: @folder@}, {name: memory, mountPath: /dev/shm}]
          volumes:
            - {name: shared, persistentVolumeClaim: {claimName: shared}}  # EDIT: a ReadWriteMany claim of yours
            - {name: memory, emptyDir: {medium: Memory}}
    Worker:
      replicas: @others@
      restartPolicy: @policy@
      template: *node
"""
_SKYPILOT = """\
@what@
# Start it with sky launch, or with sky jobs launch, which starts it again after a preemption.
name: @name@
num_nodes: @nodes@
resources: {accelerators: "H100:@gpus@"}  # EDIT: your GPU
workdir: @folder@  # copied to every node; a model and data that lie elsewhere have to be there
file_mounts: {~/lengthwise: ~/lengthwise}  # EDIT: to the right, your checkout of Lengthwise
envs:
  OUTPUT: /shared/@name@  # EDIT: a folder that all nodes share (a volume, NFS); a bucket cannot rename folders
setup: |
  pip install -c ~/lengthwise/constraints.txt ~/lengthwise
run: |
  HEAD=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
  HERE=$(echo "$SKYPILOT_NODE_IPS" | sed -n "$((SKYPILOT_NODE_RANK + 1))p")
  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240  # seconds that ranks have to save after SIGTERM
  @threads@
  @store@
  torchrun --nnodes "$SKYPILOT_NUM_NODES" --nproc-per-node "$SKYPILOT_NUM_GPUS_PER_NODE" --max-restarts @restarts@ \\
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:29500" --rdzv-id @name@ --local-addr "$HERE" \\
    --rdzv-conf "is_host=$([ "$SKYPILOT_NODE_RANK" = 0 ] && echo true || echo false)" \\
    -m lengthwise train @file@ --set "output=$OUTPUT"@resume@
"""
_KINDS = {"torchrun": _TORCHRUN, "slurm": _SLURM, "kubernetes": _KUBERNETES, "skypilot": _SKYPILOT}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Print a file, for you to edit, that starts `lengthwise train RUN.yaml` on several nodes; nothing is started."""

    config: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN.yaml")]
    """The run file (YAML)."""
    print: Annotated[str, tyro.conf.arg(metavar="|".join(_KINDS))]
    """What starts the run: a script for each node, an sbatch script, a PyTorchJob or a SkyPilot task."""
    nodes: Annotated[int, tyro.conf.arg(metavar="N")] = 2
    """The number of machines."""
    gpus_per_node: Annotated[int, tyro.conf.arg(metavar="N")] = 8
    """GPUs of one machine; every GPU runs one rank."""

    def run(self) -> int:
        """Run the command; return the exit status."""
        from lengthwise.config import load_config

        problems = Collector()
        if self.print not in _KINDS:
            problems.add(unknown_name("--print", self.print, _KINDS))
        problems.attempt(lambda: read_whole("nodes", self.nodes, most=MOST_RANKS))
        problems.attempt(lambda: read_whole("gpus_per_node", self.gpus_per_node, most=MOST_RANKS))
        config = problems.attempt(lambda: load_config(self.config))
        if not str(self.config.absolute()).isprintable():
            expected, remedy = "a path without line breaks and other control characters", "Rename it."
            problems.add(ConfigError("RUN.yaml", expected=expected, got=str(self.config), remedy=remedy))
        problems.raise_all()
        assert config is not None, "it has no problem"
        values = self._values(config)
        text = re.sub(r"@(\w+)@", lambda place: values[place[1]], _KINDS[self.print])
        print(text.partition("    Worker:\n")[0] if self.nodes == 1 else text, end="")
        return 0

    def names(self) -> Mapping[str, str]:
        """Map names of the library to what the user typed for them."""
        return named_alike("nodes gpus_per_node")

    def _values(self, config: RunConfig) -> dict[str, str]:
        run, goes_on = self.config.absolute(), config.checkpoint is not None
        name = re.sub(r"[^a-z0-9]+", "-", f"lengthwise-{run.stem.lower()}")[:40].strip("-")  # valid in Kubernetes
        again = (
            "The run saves checkpoints: after a restart it resumes from the newest."
            if goes_on
            else "The run has no `checkpoint`, so nothing restarts it; add one, then print this file again."
        )
        return {
            "what": f"# Trains {run} on {self.nodes} x {counted(self.gpus_per_node, 'GPU')}. "
            f"Printed by lengthwise launch.\n# {again}",
            "needs": "# All nodes need the run file, its model and its data at the same paths, and one shared folder\n"
            f"# for its output: {printable(str(config.output))}",
            "store": "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or nodes do not meet after a restart",
            "threads": _threads("$(nproc)", self.gpus_per_node),
            "threads_of_slurm": _threads("SLURM_CPUS_ON_NODE", self.gpus_per_node),
            "name": name,
            "nodes": str(self.nodes),
            "others": str(self.nodes - 1),
            "gpus": str(self.gpus_per_node),
            "head": "localhost" if self.nodes == 1 else "node-0",
            "run": shlex.quote(str(run)),
            "file": shlex.quote(f"./{run.name}"),
            "quoted_run": json.dumps(str(run).replace("$", "$$"), ensure_ascii=False),  # Kubernetes reads $( ) and $$
            "folder": json.dumps(str(run.parent), ensure_ascii=False),
            "resume": " --resume-if-any" if goes_on else "",
            "listed_resume": ", --resume-if-any" if goes_on else "",
            "restarts": "3" if goes_on else "0",
            "requeue": "requeue" if goes_on else "no-requeue",
            "again": 'scontrol requeue "$SLURM_JOB_ID"' if goes_on else "echo 'no checkpoint: not started again' >&2",
            "policy": "OnFailure" if goes_on else "Never",
        }


def _threads(cores: str, ranks: int) -> str:
    """Return the line of a script that divides a node's cores among its ranks, unless the user has set it."""
    of_each = f"$(({cores} > {ranks} ? {cores} / {ranks} : 1))"
    return f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{of_each}}}  # cores of a rank; torchrun would take 1"
