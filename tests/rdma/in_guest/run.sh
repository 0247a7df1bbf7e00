# The guest's first process, from the project's root: Soft-RoCE devices, the scenarios, and the end of the guest.
# "alone": both ranks here, three devices, the port of the last one down. "prefill", "decode": one rank each, joined by a
# wire that loses one packet in a hundred, in both directions.
set -eu
guest=$(sed 's/.*guest=\([a-z]*\).*/\1/' /proc/cmdline)

soft_roce() { # device, network device, address
    ip link set "$2" mtu 4200 up # for RDMA packets of 4096 bytes
    ip address add "$3/24" dev "$2"
    rdma link add "$1" type rxe netdev "$2"
}

modprobe -a crc32_generic ib_uverbs rdma_ucm rdma_rxe # without crc32_generic `rdma link add` fails
ip link set lo up
case $guest in
alone)
    for i in 0 1 2; do
        ip link add "net$i" type dummy
        soft_roce "rxe$i" "net$i" "10.77.$i.1"
    done
    ip link set net2 down
    ;;
prefill) soft_roce rxe0 eth0 10.77.0.1 ;;
decode) soft_roce rxe0 eth0 10.77.0.2 ;;
esac
[ "$guest" = alone ] || tc qdisc add dev eth0 root netem loss 1%
export PYTHONPATH="$PWD:$PWD/tests/transfer"
python3 tests/rdma/in_guest/scenarios.py "$guest" > /dev/ttyS1
