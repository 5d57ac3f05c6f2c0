# Runs an independent test program against the units of a virtio-scsi device. $NODES: the nodes of
# one unit, or of two units on the same disk; $SUITES: the suites, separated by commas.
# The exit status reports failed tests; some failures are expected.
iscsi-test-cu --dataloss --test="$SUITES" $NODES 2>&1 </dev/null || true
