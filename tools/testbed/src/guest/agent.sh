#!/bin/busybox sh
# The guest's end of the control port. One request a line from the host:
#   run ID SNIPPET    run a snippet of shell in a separate session
#   kill ID SIGNAL    send a signal to the process group of that session
# and one answer a line:
#   up                requests are read
#   out ID LINE       the snippet wrote this line
#   end ID CODE       the snippet ended with this code (128 + N for signal N)
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root NODEKEEL_GUEST=1
tasks=/run/nodekeel
mkdir -p "$tasks"
# The driver creates the port's device after a while, and no udev reports it here.
until port=$(ls /dev/vport*p1 2>/dev/null); do usleep 5000; done
exec 3<>"$port"

# Forwards the pipe's lines until the mark that `start` writes after the snippet's output: a process that the snippet left
# behind may keep the pipe open forever.
report='{
    at = index($0, "\036end ")
    if (at == 0) print "out " id " " $0
    if (at > 1) print "out " id " " substr($0, 1, at - 1)
    if (at > 0) { print "end " id " " substr($0, at + 5); exit }
    fflush()
}'

start() {
    # Opened before the fork: a reader that opened its end later could come after all output was written.
    exec 4<>"$tasks/$1/out" 5>&-
    awk -v id="$1" "$report" <&4 >&3 4>&- &
    setsid sh -c "exec 3>&- 4>&- 5>&-; echo \$\$ >$tasks/$1/started; $2" </dev/null >&4 2>&4
    printf '\036end %s\n' "$?" >&4
}

echo up >&3
while read -r verb id rest <&3; do
    case $verb in
    run)
        mkdir "$tasks/$id"
        mkfifo "$tasks/$id/out" "$tasks/$id/started"
        # Opened for both directions, a pipe needs no peer: the exit of a child would interrupt an open that waits.
        exec 5<>"$tasks/$id/started"
        start "$id" "$rest" &
        until read -r pid <&5; do :; done
        exec 5>&-
        echo "$pid" >"$tasks/$id/pid"
        ;;
    kill)
        kill -s "$rest" "-$(cat "$tasks/$id/pid")"
        ;;
    esac
done
