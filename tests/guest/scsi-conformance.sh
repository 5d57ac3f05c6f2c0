# Runs a test program of others against the units of a virtio-scsi device. $NODES: the nodes of one
# unit, or of two units on the same disk; $SUITES: what is run, separated by commas.
# The exit status says that tests have failed, which is expected of some.
iscsi-test-cu --dataloss --test="$SUITES" $NODES 2>&1 </dev/null || true
