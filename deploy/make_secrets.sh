#!/bin/sh
# make_secrets.sh [FOLDER]: writes the keys that the Compose and Kubernetes files use, into deploy/secrets by default.
#   cluster.key   what nodes show each other
#   api.keys      the keys of clients, for --api-key-file: one user, one administrator
#   user.key      the user's key alone, to ask with
#   admin.key     the administrator's alone, for Prometheus
# Containers read them as another user, so the files can be read by all and the folder by its owner alone.
set -eu
unset CDPATH
folder=${1:-$(dirname -- "$0")/secrets}
case $folder in /*) ;; *) folder=./$folder ;; esac
for key in cluster.key api.keys user.key admin.key; do
    [ ! -e "$folder/$key" ] || { echo "$0: $folder has keys already; remove it to get new ones" >&2; exit 1; }
done

random() { od -An -tx1 -N32 /dev/urandom | tr -d ' \n'; }

mkdir -p "$folder"
chmod 700 "$folder"
cd "$folder"
random > cluster.key
random > user.key
random > admin.key
printf '# role  name  key\nadmin  ops  %s\nuser  client  %s\n' "$(cat admin.key)" "$(cat user.key)" > api.keys
chmod 644 cluster.key user.key admin.key api.keys
