# Waits until each of $DISKS has answered more reads and writes of the loads of moved-start.sh.
# After a move, the daemons of the target have.
answered() {
    read -r reads _ _ _ writes _ <"/sys/block/$1/stat"
}
more=8
wanted=
for disk in $DISKS; do
    answered "$disk"
    wanted="$wanted $disk:$((reads + more)):$((writes + more))"
done
for each in $wanted; do
    disk=${each%%:*}
    least=${each#*:}
    until answered "$disk" && [ "$reads" -ge "${least%:*}" ] && [ "$writes" -ge "${least#*:}" ]; do
        ! ls /tmp/*.status 2>/dev/null || { tail -n 20 /tmp/*.fio /tmp/*.tree; exit 1; }
        usleep 20000
    done
done
