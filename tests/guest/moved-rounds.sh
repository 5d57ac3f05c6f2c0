# Waits until both loads of moved-start.sh have finished $ROUNDS rounds, and the one that runs now.
fio_rounds() {
    cat /tmp/fio.rounds 2>/dev/null | wc -l
}
tree_rounds() {
    cat /tmp/tree.log 2>/dev/null | grep -c '^round' || true
}
fio=$(($(fio_rounds) + ROUNDS + 1))
tree=$(($(tree_rounds) + ROUNDS + 1))
until [ "$(fio_rounds)" -ge "$fio" ] && [ "$(tree_rounds)" -ge "$tree" ]; do
    [ ! -e /tmp/fio.failed ] || { cat /tmp/fio.log; exit 1; }
    [ ! -e /tmp/tree.status ] || { cat /tmp/tree.log; exit 1; }
    usleep 50000
done
