"""An S3 server for development: moto, which keeps everything in memory and forgets it with the process.

Real use needs a store that keeps what it is given: any S3 service that honours `If-None-Match: *` (Amazon S3, MinIO,
Ceph, …). Set AWS_ENDPOINT_URL, the keys and MARLAAS_STORE_URL in .env.cluster, and start with `--scale store=0`.
"""

import os
import time

import boto3
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer("0.0.0.0", 9000, verbose=False)
server.start()
client = boto3.client(
    "s3",
    endpoint_url="http://127.0.0.1:9000",
    region_name="us-east-1",
    aws_access_key_id="store",
    aws_secret_access_key="store",
)
client.create_bucket(Bucket=os.environ["BUCKET"])
while True:
    time.sleep(3600)
