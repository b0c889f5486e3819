"""The laws as tests, a file for each or for two that are one idea. `StagerConformance` is made of all of them.

The number in a test's name is the law's in `xferlib.protocol.LAWS`, the rest of the name is the sentence that the test proves.
"""
