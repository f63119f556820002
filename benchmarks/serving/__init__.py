"""What do clients of `inflight serve` get: throughput, waiting times, answers under overload, several replicas?"""
