"""Ops made of kernels of several backends, or of several GPUs: one schedule a file, by the name of the op.

Backends do not import one another, so that what takes kernels of both lies above them. For dispatch, which lies
above schedules, a schedule is a kernel of its op like any other: it has a call, a refusal and a config.
"""
