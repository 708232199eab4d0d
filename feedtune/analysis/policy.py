"""All thresholds in one record, so that a report can show them and a test can move them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """Thresholds of measurement and verdict; sources in METHODS (sections in brackets).

    Attributes:
        near_best: settings whose lower bound is within this share of the best are as good; the cheapest wins.
        min_gain: a ratio below this is no gain worth a change, whatever its interval [2].
        gpu_bound: starvation below this leaves no gain of ``min_gain`` to be had.
        critical: starvation from this on is worth a sentence on the data, not only on the loader [3].
        unstable: coefficient of variation inside a block above which its rate is called unstable [2].
        above_bound: a rate above workers / time of a batch in a worker by more than this is unstable.
        noisy: coefficient of variation from which a confirmation measures longer.
        longer: and how many times longer.
        uneven: spread of elements a batch above which rates are compared per element.
        ladder_step: a doubling of workers that brings less than this ends the climb.
        fill: share of a limit (memory, /dev/shm, descriptors) that a trial may fill.
        repeated: share of the first samples of iterable data, yielded by more than one worker, from which
            it counts as not split between them.
        edge_share: share of an epoch lost to starting workers that is worth advice.
        material: an avoidable share of the step from this on makes a class [3].
        severe: from this on it is critical; ranks that are late in turns, by chance, count from here on [3].
        second: a second loss of at least this share of the largest makes the class mixed [3].
        one_culprit: share of the steps with a material imbalance in which one rank has to be last [3].
        apart: how far ranks have to lie apart in a step, in mean steps, for that step to have a last one.
        rho: rank correlation between elements and work that makes late ranks a matter of lengths [3].
        inconsistent: parts that exceed the step by more than this share of it contradict each other [3].
        slow_worker: mean fetch time against the median of the others from which a worker is slow [3].
        pause: share of the time from which something that keeps coming between the steps is listed.
        lone_step: what comes once in 50 steps, so many times as long as the next longest, decides no class.
    """

    near_best: float = 0.02
    min_gain: float = 1.02
    gpu_bound: float = 0.02
    critical: float = 0.10
    unstable: float = 0.10
    above_bound: float = 0.03
    noisy: float = 0.04
    longer: float = 2.5
    uneven: float = 0.05
    ladder_step: float = 0.03
    fill: float = 0.8
    repeated: float = 0.05
    edge_share: float = 0.01
    material: float = 0.10
    severe: float = 0.20
    second: float = 0.70
    one_culprit: float = 0.80
    apart: float = 0.05
    rho: float = 0.6
    inconsistent: float = 0.01
    slow_worker: float = 1.3
    pause: float = 0.02
    lone_step: float = 5.0


POLICY = Policy()
