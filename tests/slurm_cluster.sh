#!/usr/bin/env bash
# A SLURM of this one machine: as many nodes as asked for, each a slurmd of its own on 127.0.0.1.
#
#   tests/slurm_cluster.sh install                              the packages, with apt-get, as root
#   tests/slurm_cluster.sh up FOLDER PORT [NODES=2] [CPUS=1]    starts it, or leaves it as it is
#   tests/slurm_cluster.sh start FOLDER NODE                    one slurmd that is not running
#   tests/slurm_cluster.sh down FOLDER                          ends everything in it
#
# All that it writes lies in FOLDER, but for the nodes' names in /etc/hosts: a job's processes find
# one another by them. slurmctld listens on PORT, node number i on PORT + i.
# Then: export SLURM_CONF=FOLDER/slurm.conf
set -euo pipefail

PACKAGES=(slurmctld slurmd slurm-client munge)

missing() {
  local program
  for program in slurmctld slurmd sbatch munged; do command -v "$program" || return 0; done >/dev/null
  return 1
}

install() {
  missing || return 0
  [ "$(id -u)" = 0 ] || { echo "SLURM is not installed, and only root can do that"; exit 1; }
  export DEBIAN_FRONTEND=noninteractive
  # Services are not started: no systemd here, and the machine's own SLURM is not what is wanted.
  local get=(apt-get -qq -o DPkg::Lock::Timeout=120 install -y --no-install-recommends)
  "${get[@]}" "${PACKAGES[@]}" >/dev/null 2>&1 ||
    { apt-get -qq update && "${get[@]}" "${PACKAGES[@]}" >/dev/null; }
}

alive() { # a pid file; a zombie, as where nothing reaps them, is not alive
  [ -s "$1" ] && grep -qs '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$(<"$1")/status"
}

until_true() { # SECONDS COMMAND...
  local tries=$(($1 * 10))
  shift
  while ! "$@" >/dev/null 2>&1; do ((tries-- > 0)) || return 1; sleep 0.1; done
}

ended() { ! alive "$1"; }

end() { # the process of a pid file
  alive "$1" || return 0
  kill "$(<"$1")" 2>/dev/null || true
  until_true 10 ended "$1" || kill -9 "$(<"$1")" 2>/dev/null || true
}

fail() {
  echo "$1" >&2
  tail -n 20 "$FOLDER"/log/* >&2
  exit 1
}

configuration() { # PORT NODES CPUS
  local i memory
  memory=$(awk '/MemTotal/ {print int($2 / 1024 * 0.9)}' /proc/meminfo)
  # cred_expire: a requeued job may start again after so many seconds; 120 by default, and below 5.
  # FirstJobId: the jobs of another such cluster on this machine have other ports.
  # config_overrides: nodes may claim more CPUs together than the machine has.
  cat <<CONF
ClusterName=grpo
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$1
FirstJobId=$(($1 * 16))
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$FOLDER/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation=$FOLDER/state
SlurmctldPidFile=$FOLDER/slurmctld.pid
SlurmctldLogFile=$FOLDER/log/slurmctld
SlurmdSpoolDir=$FOLDER/spool/%n
SlurmdPidFile=$FOLDER/slurmd-%n.pid
SlurmdLogFile=$FOLDER/log/slurmd-%n
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=60
KillWait=5
CompleteWait=0
JobRequeue=1
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
CONF
  for ((i = 1; i <= $2; i++)); do
    echo "NodeName=n$i NodeHostname=localhost NodeAddr=127.0.0.1 Port=$(($1 + i)) CPUs=$3" \
      "RealMemory=$((memory / $2)) State=UNKNOWN"
  done
  echo "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60 State=UP"
  echo "PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=2 State=UP"
}

up() { # PORT NODES CPUS
  local i
  missing && { echo "SLURM is not installed; tests/slurm_cluster.sh install"; exit 1; }
  mkdir -p "$FOLDER"/{state,log,spool}
  # munge's own of this cluster: key, socket, daemon. --force: it is not in a system folder.
  if ! alive "$FOLDER/munged.pid"; then
    [ -s "$FOLDER/munge.key" ] || (umask 077; head -c 1024 /dev/urandom >"$FOLDER/munge.key")
    rm -f "$FOLDER"/munge.socket*
    munged --force --key-file="$FOLDER/munge.key" --socket="$FOLDER/munge.socket" \
      --pid-file="$FOLDER/munged.pid" --log-file="$FOLDER/log/munged" \
      --seed-file="$FOLDER/munge.seed" 2>"$FOLDER/log/munged-start"
    until_true 10 munge -S "$FOLDER/munge.socket" -n || fail "munged did not start"
  fi
  configuration "$@" >"$FOLDER/slurm.conf.new"
  if ! cmp -s "$FOLDER/slurm.conf.new" "$FOLDER/slurm.conf"; then # another shape: begins empty
    for file in "$FOLDER"/slurm*.pid; do end "$file"; done
    rm -rf "$FOLDER"/state/* "$FOLDER"/spool/*
    mv "$FOLDER/slurm.conf.new" "$FOLDER/slurm.conf"
  fi
  for ((i = 1; i <= $2; i++)); do
    getent hosts "n$i" >/dev/null || echo "127.0.0.1 n$i # tests/slurm_cluster.sh" >>/etc/hosts
  done
  alive "$FOLDER/slurmctld.pid" || slurmctld -f "$SLURM_CONF" -i
  until_true 20 sh -c 'scontrol ping | grep -q UP' || fail "slurmctld did not start"
  for ((i = 1; i <= $2; i++)); do start "n$i"; done
  until_true 30 all_there "$2" || { sinfo -N -l >&2; fail "not all nodes came up"; }
}

all_there() { [ "$(sinfo -h -N -p main -o %T | grep -cE '^(idle|mixed|allocated)$')" = "$1" ]; }

start() { # NODE
  mkdir -p "$FOLDER/spool/$1"
  alive "$FOLDER/slurmd-$1.pid" || slurmd -N "$1" -f "$SLURM_CONF"
}

down() {
  if alive "$FOLDER/slurmctld.pid"; then
    scancel --full --user="$(id -un)" 2>/dev/null || true
    until_true 15 sh -c '[ -z "$(squeue -h)" ]' || true
  fi
  local file status=0
  set +e # each, whatever becomes of the others
  for file in "$FOLDER"/slurm*.pid "$FOLDER/munged.pid"; do end "$file"; done
  for file in "$FOLDER"/*.pid; do
    alive "$file" && { echo "$file is of a process that does not end" >&2; status=1; }
  done
  return "$status"
}

VERB=${1:-}
[ "$VERB" = install ] && { install; exit; }
FOLDER=$(realpath -m "${2:?the folder of the cluster}")
export SLURM_CONF=$FOLDER/slurm.conf
case $VERB in
  up) up "${3:?the port of slurmctld}" "${4:-2}" "${5:-1}" ;;
  start) start "${3:?the name of the node}" ;;
  down) down ;;
  *) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
