"""Links: sequences sent and received between the ranks of two engines, in chunks that digests verify.

Who waits how long:

=====================================  ==================================================================
a transfer                             `timeout` of `send` and `receive`, 30 s
a peer that owes something             its wire is asked each `link._PROBES`, 0.5 s, whether it lives; a
                                       silent one that lives ends with the `timeout` of the transfer
a note that is not answered            repeated after `flows.REPEAT_SECONDS`, 0.1 to 1 s
a stop that is not answered            repeated `flows._MOST_STOPS` times, then the peer is given up
a call of another thread               `endpoint._ANSWERS`, 30 s
the thread itself                      `endpoint._SHORT` to `_IDLE` between two rounds
cards, and proofs of a secret          `timeout` of `talk.Talk`
a connection that begins or ends       `meet_seconds`, `drop_seconds` of the wire
=====================================  ==================================================================
"""
