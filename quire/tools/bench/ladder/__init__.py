"""`quire bench ladder`: all rungs on one workload (`rungs`, `climb`), and the single ideas where
they show best (`experiments`, `attention`). The rungs that are short loops are in
`quire/tools/ladder`.
"""
