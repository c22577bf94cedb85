"""S3's errors: their codes, statuses and messages, and what other errors become.

Owns that table. Renders nothing.
"""

from __future__ import annotations

from typing import ClassVar

from fanout.disk.log import Deleted
from fanout.disk.objects import NameIsDirectory, ParentIsFile
from fanout.disk.uploads import NoUpload
from fanout.errors import FanoutError, meaning

__all__ = ["S3Error", "error_of", "refused"]

#: code -> HTTP status and the message where nothing better is known.
_CODES: dict[str, tuple[int, str]] = {
    "AccessControlListNotSupported": (400, "The bucket does not allow ACLs: keys decide who may do what."),
    "AccessDenied": (403, "Access Denied"),
    "AuthorizationHeaderMalformed": (400, "The authorization header is malformed."),
    "AuthorizationQueryParametersError": (400, "The query parameters of the signature are malformed."),
    "BadDigest": (400, "The Content-MD5 or checksum you specified did not match what was received."),
    "BucketAlreadyExists": (409, "The requested bucket name is not available."),
    "BucketAlreadyOwnedByYou": (409, "You already own a bucket of this name."),
    "BucketNotEmpty": (409, "The bucket you tried to delete is not empty."),
    "ConditionalRequestConflict": (409, "A conflicting operation is under way."),
    "EntityTooLarge": (400, "Your proposed upload exceeds the maximum allowed size."),
    "EntityTooSmall": (400, "Your proposed upload is smaller than the minimum allowed size."),
    "IncompleteBody": (400, "You did not provide the number of bytes specified by the Content-Length header."),
    "InternalError": (500, "We encountered an internal error. Please try again."),
    "InvalidAccessKeyId": (403, "The access key id you provided does not exist in our records."),
    "InvalidArgument": (400, "Invalid argument."),
    "InvalidBucketName": (400, "The specified bucket is not valid."),
    "InvalidBucketState": (409, "The request is not valid for the current state of the bucket."),
    "InvalidDigest": (400, "The Content-MD5 or checksum value that you specified is not valid."),
    "InvalidLocationConstraint": (400, "The specified location constraint is not valid."),
    "InvalidPart": (400, "One or more of the specified parts could not be found, or has another entity tag."),
    "InvalidPartNumber": (416, "The requested part number is not satisfiable."),
    "InvalidPartOrder": (400, "The list of parts was not in ascending order."),
    "InvalidRange": (416, "The requested range is not satisfiable."),
    "InvalidRequest": (400, "Invalid request."),
    "InvalidSecurity": (403, "The provided security credentials are not valid."),
    "InvalidStorageClass": (400, "The storage class you specified is not valid: there is STANDARD."),
    "InvalidTag": (400, "The tag provided was not a valid tag."),
    "InvalidToken": (400, "The provided token is malformed or otherwise not valid."),
    "InvalidURI": (400, "The specified URI couldn't be parsed."),
    "KeyIsDirectory": (409, "A directory of this disk has that name."),
    "KeyTooLongError": (400, "Your key is too long: a key has at most 1024 bytes."),
    "MalformedPOSTRequest": (400, "The body of your POST request is not well-formed multipart/form-data."),
    "MalformedTrailerError": (400, "The request contained trailing data that was not well-formed."),
    "MalformedXML": (400, "The XML you provided was not well-formed or did not validate against our schema."),
    "MaxMessageLengthExceeded": (400, "Your request was too big."),
    "MetadataTooLarge": (400, "Your metadata headers exceed the maximum allowed metadata size."),
    "MethodNotAllowed": (405, "The specified method is not allowed against this resource."),
    "MissingContentLength": (411, "You must provide the Content-Length HTTP header."),
    "MissingSecurityHeader": (400, "Your request was missing a required header."),
    "NoSuchBucket": (404, "The specified bucket does not exist."),
    "NoSuchKey": (404, "The specified key does not exist."),
    "NoSuchUpload": (404, "The specified multipart upload does not exist; it may have been aborted or completed."),
    "NoSuchVersion": (404, "The specified version does not exist."),
    "NotImplemented": (501, "This functionality is not implemented."),
    "NotModified": (304, "Not Modified"),
    "OperationAborted": (409, "A conflicting operation is under way against this resource."),
    "ParentIsObject": (409, "A file of this disk has the name of a directory that the key needs."),
    "PreconditionFailed": (412, "At least one of the preconditions you specified did not hold."),
    "RequestTimeTooSkewed": (403, "The difference between the request time and the server's time is too large."),
    "ServiceUnavailable": (503, "Please reduce your request rate, or try again later."),
    "SignatureDoesNotMatch": (403, "The request signature we calculated does not match the one you provided."),
    "SlowDown": (503, "Please reduce your request rate."),
    "XAmzContentSHA256Mismatch": (400, "The provided x-amz-content-sha256 does not match what was computed."),
}
for _name in (
    "NoSuchBucketPolicy", "NoSuchCORSConfiguration", "NoSuchLifecycleConfiguration", "NoSuchTagSet",
    "NoSuchWebsiteConfiguration", "NoSuchPublicAccessBlockConfiguration", "ObjectLockConfigurationNotFoundError",
    "ReplicationConfigurationNotFoundError",
    "ServerSideEncryptionConfigurationNotFoundError",
):  # fmt: skip
    _CODES[_name] = (404, "There is no such configuration.")


class S3Error(FanoutError):
    """An answer in S3's words. `s3` is the code; `fields` go into the XML."""

    code: ClassVar[str] = "invalid"

    def __init__(self, s3: str, message: str = "", **fields: str) -> None:
        self.s3 = s3
        self.status, usual = _CODES[s3]
        self.message = message or usual
        self.fields = fields
        super().__init__(f"{s3}: {self.message}")


def refused(argument: str, value: str, allowed: str) -> S3Error:
    """Return the error for an argument that is no good."""
    return S3Error("InvalidArgument", allowed, ArgumentName=argument, ArgumentValue=value[:200])


def error_of(error: FanoutError) -> S3Error:
    """Return an error of the layers below in S3's words."""
    if isinstance(error, S3Error):
        return error
    if isinstance(error, Deleted):
        return S3Error("NoSuchBucket")
    if isinstance(error, NoUpload):
        return S3Error("NoSuchUpload", str(error))
    if isinstance(error, NameIsDirectory):
        return S3Error("KeyIsDirectory")
    if isinstance(error, ParentIsFile):
        return S3Error("ParentIsObject")
    means = meaning(error)
    found = S3Error(means.s3, str(error) if means.http < 500 or means.retry else "")
    found.status = means.http
    return found
