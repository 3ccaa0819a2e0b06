# Object storage for the tests.
ARG BASE
FROM ${BASE}
COPY weed /usr/local/bin/weed
USER 65532:65532
ENTRYPOINT ["weed"]
