#!/bin/busybox sh
# The guest's first process in its root: mounts, network, then busybox's init, which reaps orphans and runs the agent.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mkdir -p /dev/pts /dev/shm /dev/mqueue
mount -t devpts -o mode=0620,ptmxmode=0666 devpts /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t mqueue mqueue /dev/mqueue
mount -t tmpfs -o mode=0755 tmpfs /run
# The image's files in /tmp (a build may be there) stay visible.
mkdir -p /mnt
mount --bind /tmp /mnt
mount -t tmpfs -o mode=1777 tmpfs /tmp
for entry in /mnt/*; do
    [ -e "$entry" ] || continue
    if [ -d "$entry" ]; then mkdir "/tmp/${entry##*/}"; else : >"/tmp/${entry##*/}"; fi
    mount --bind "$entry" "/tmp/${entry##*/}"
done
umount /mnt
mount -t cgroup2 -o nsdelegate cgroup2 /sys/fs/cgroup
mount --make-rshared /
ln -sf /proc/self/fd /dev/fd
ln -sf /proc/self/fd/0 /dev/stdin
ln -sf /proc/self/fd/1 /dev/stdout
ln -sf /proc/self/fd/2 /dev/stderr
for module in $(echo "$NODEKEEL_MODULES" | tr , ' '); do
    modprobe "$module" || echo "nodekeel: module $module could not be loaded"
done
ip link set lo up
# QEMU's user networking: this address, the host at .2, a name server at .3.
if [ -e /sys/class/net/eth0 ]; then
    ip addr add 10.0.2.15/24 dev eth0
    ip link set eth0 up
    ip route add default via 10.0.2.2
    echo "nameserver 10.0.2.3" >/etc/resolv.conf
fi
exec init
