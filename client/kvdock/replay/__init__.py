"""What a trace of prompts would have found in pools of several sizes, under several policies.

``trace`` reads the trace, ``simulation`` plays it to the policies (``policies``, ``memory``,
``bound``) and ``server`` to a real server. ``advice`` says what follows from it, ``plot`` draws it.
All but ``trace`` and ``server`` are pure.
"""
