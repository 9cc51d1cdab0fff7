"""Files that start a run on several machines: torchrun's command lines, and what clusters take. Text alone."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

TODO = "FILL_IN"
"""Marks what only its user knows."""
PORT = 29500
_STOP_SECONDS = 110  # from SIGTERM to SIGKILL of the ranks; torchrun's own 30 are few for a large checkpoint
_POD_SECONDS = 120  # the same of a pod: a little more, for torchrun's own end


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A run on `nodes` machines of `gpus` ranks each. run_file, output: as every machine names them."""

    name: str
    run_file: str
    output: str
    nodes: int
    gpus: int
    max_restarts: int
    on_cpu: bool

    @property
    def train_words(self) -> list[str]:
        """What torchrun starts on every rank; it goes on from the newest checkpoint, where there is one."""
        return ["-m", "lengthwise", "train", self.run_file, "--resume-if-any"]

    @property
    def train(self) -> str:
        """The same for a shell."""
        return shlex.join(self.train_words)

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables for all ranks."""
        threads = {"OMP_NUM_THREADS": "1"} if self.on_cpu else {"OMP_NUM_THREADS": "8", "NCCL_DEBUG": "WARN"}
        return threads | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_STOP_SECONDS)}

    @property
    def note(self) -> list[str]:
        """What the user must know of this run's output."""
        if "://" in self.output:
            return [f"The output is at {self.output}: machines may vanish with their disks."]
        return [f"The output, {self.output}, must be a folder that all machines share, or a URL (s3://...)."]


def torchrun_lines(run: Launched) -> str:
    """Return the command of each machine."""
    lines = [
        "# The same on every machine, in the same folder, within a few minutes of each other.",
        *(f"# {line}" for line in run.note),
        f"HEAD={TODO}  # the first machine, as all of them reach it; its port {PORT} must be open to the others",
        f"NODE={TODO}  # 0 on the first machine, 1 on the next, ...",
        *(f"export {name}={value}" for name, value in run.environment.items()),
        f'torchrun --nnodes {run.nodes} --nproc-per-node {run.gpus} --node-rank "$NODE" \\',
        f'  --master-addr "$HEAD" --master-port {PORT} --max-restarts {run.max_restarts} \\',
        f"  {run.train}",
        "# A rank that fails: all are started again, and the run goes on from its newest checkpoint.",
    ]
    return "\n".join(lines) + "\n"


def slurm_file(run: Launched) -> str:
    """Return a file for sbatch."""
    gpus = [] if run.on_cpu else [f"#SBATCH --gpus-per-node={run.gpus}"]
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={run.name}",
        f"#SBATCH --nodes={run.nodes}",
        "#SBATCH --ntasks-per-node=1            # one torchrun a machine, which starts its ranks",
        *gpus,
        "#SBATCH --exclusive                    # or --cpus-per-task and --mem of a whole machine",
        "#SBATCH --time=24:00:00",
        "#SBATCH --requeue                      # a machine that fails: the job starts again, and goes on",
        "#SBATCH --open-mode=append             # into the same log",
        "#SBATCH --output=%x-%j.log",
        "#SBATCH --signal=B:USR1@300            # five minutes before the end of --time, to this script",
        f"# Add --account and --partition of your cluster: sbatch --account={TODO} --partition={TODO} FILE",
        *(f"# {line}" for line in run.note),
        "set -euo pipefail",
        "",
        *(f"export {name}={value}" for name, value in run.environment.items()),
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f"port=$(({PORT} + SLURM_JOB_ID % 1000))  # jobs that share a machine do not meet",
        "",
        "stop() {  # SIGTERM to the ranks: they commit a checkpoint and end; then the job waits for its next turn",
        '  scancel --signal=TERM "$SLURM_JOB_ID"',
        '  wait "$started" || true',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "}",
        "trap stop USR1",
        f"srun --kill-on-bad-exit=1 torchrun --nnodes {run.nodes} --nproc-per-node {run.gpus} \\",
        '  --rdzv-backend c10d --rdzv-endpoint "$head:$port" --rdzv-id "$SLURM_JOB_ID" \\',
        f"  --max-restarts {run.max_restarts} {run.train} &",
        "started=$!",
        'wait "$started"',
    ]
    return "\n".join(lines) + "\n"


def kubernetes_file(run: Launched) -> str:
    """Return a PyTorchJob of Kubeflow's training operator."""
    limits = "" if run.on_cpu else f"\n                  nvidia.com/gpu: {run.gpus}"
    variables = "".join(
        f"\n                - {{name: {name}, value: {value!r}}}" for name, value in run.environment.items()
    )

    command = json.dumps(["torchrun", *run.train_words])

    def replicas(kind: str, number: int) -> str:
        return f"""    {kind}:
      replicas: {number}
      restartPolicy: OnFailure
      template:
        spec:
          terminationGracePeriodSeconds: {_POD_SECONDS}  # SIGTERM: the ranks commit a checkpoint and end
          containers:
            - name: pytorch                   # the operator looks for this name
              image: {TODO}                  # CUDA, torch and lengthwise
              workingDir: /workspace
              command: {command}
              env:{variables}
              resources:
                limits:
                  memory: {TODO}{limits}
              volumeMounts:
                - {{name: workspace, mountPath: /workspace}}
                - {{name: shared-memory, mountPath: /dev/shm}}
          volumes:
            - name: workspace                 # run file, data and output, the same for all pods
              persistentVolumeClaim: {{claimName: {TODO}}}
            - name: shared-memory             # the default of 64 MB is too little for NCCL
              emptyDir: {{medium: Memory}}
"""

    heading = [
        "kubectl apply -f FILE; for Kubeflow's training operator 1.7 to 1.9 (PyTorchJob), which tells torchrun by",
        "variables (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, ...) where the machines meet. In Trainer 2 it is a",
        "TrainJob's command.",
    ]
    notes = "".join(f"# {line}\n" for line in (*heading, *run.note))
    workers = replicas("Worker", run.nodes - 1) if run.nodes > 1 else ""
    return f"""{notes}apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: {run.name}
spec:
  nprocPerNode: "{run.gpus}"
  runPolicy:
    backoffLimit: {run.max_restarts}  # pods that failed are started again, and go on from the newest checkpoint
    cleanPodPolicy: None
  pytorchReplicaSpecs:
{replicas("Master", 1)}{workers}"""


def skypilot_file(run: Launched) -> str:
    """Return a task of SkyPilot."""
    resources = "cpus: 4+" if run.on_cpu else f"accelerators: H100:{run.gpus}  # or others"
    variables = "".join(f"\n  {name}: {value!r}" for name, value in run.environment.items())
    command = f"torchrun --nnodes $SKYPILOT_NUM_NODES --node-rank $SKYPILOT_NODE_RANK --nproc-per-node {run.gpus}"
    notes = "".join(f"# {line}\n" for line in run.note)
    return f"""# sky launch FILE; or sky jobs launch FILE, which starts it again where a spot machine was taken away
{notes}name: {run.name}
num_nodes: {run.nodes}
resources:
  {resources}
  # use_spot: true  # with an output at a URL: what a machine had is gone with it
workdir: .  # copied to every machine: the run file, and data that are not at a URL
envs:{variables}
setup: |
  pip install {TODO}  # lengthwise, and a CUDA build of torch
run: |
  head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
  {command} \\
    --master-addr $head --master-port {PORT} --max-restarts {run.max_restarts} \\
    {run.train}
"""


KINDS: Mapping[str, Callable[[Launched], str]] = {
    "torchrun": torchrun_lines,
    "slurm": slurm_file,
    "kubernetes": kubernetes_file,
    "skypilot": skypilot_file,
}
