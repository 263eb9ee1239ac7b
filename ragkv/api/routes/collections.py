"""/v1/collections: named sets of documents to ask questions over."""

import dataclasses
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response

from ragkv.rag import Rag
from ragkv.retrieval import Index
from ragkv.runtime import Check

from ..answers import check_text
from ..bodies import resources as schemas
from ..bodies.documents import ID_PATTERN, DocumentsIn
from ..call import ApiCall, ApiCallDep
from ..documents.upload_parsing import FORM, Parsed, Upload, parse_upload
from ..errors import not_found
from ..keys import Principal
from ..limits import check_at_most, check_disk
from ..sources import sources_of, title_of
from ..tenants import Tenant

router = APIRouter(prefix="/v1/collections", tags=["collections"])

# A JSON body up to this size is parsed here, faster than its way to a process and back.
SMALL_BYTES = 1 << 16

CollectionName = Annotated[
    str, Path(pattern=schemas.NAME_PATTERN, description="Its name.", examples=["docs"])
]
DocumentId = Annotated[
    str, Path(pattern=ID_PATTERN, description="Its id, maybe with slashes.", examples=["bridge"])
]

_FILES = {
    "type": "array",
    "items": {"type": "string", "format": "binary"},
    "minItems": 1,
    "description": "Files whose names end in one of the accepted types; a file's name is its "
    "document's id.",
}
_FORM = {
    "type": "object",
    "properties": {"files": _FILES},
    "required": ["files"],
    "additionalProperties": False,
}
# FastAPI does not know these bodies, because the processes that parse uploads read them.
_DOCUMENTS = DocumentsIn.model_json_schema()
_DOCUMENTS["properties"]["documents"]["items"] = _DOCUMENTS.pop("$defs")["DocumentIn"]
_KINDS = {"application/json": {"schema": _DOCUMENTS}, "multipart/form-data": {"schema": _FORM}}
_DOCUMENTS_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": _KINDS}}


@router.get("", summary="List collections")
async def list_collections(call: ApiCallDep) -> schemas.Listed[schemas.CollectionBody]:
    """The caller's collections, by name."""
    return schemas.Listed(
        data=await call.on_tenant(lambda tenant, _: tenant.collections.folders.infos())
    )


@router.post(
    "",
    status_code=201,
    summary="Create a collection",
    responses={200: {"description": "It existed", "model": schemas.CollectionBody}},
)
async def create_collection(
    body: schemas.CollectionIn, response: Response, call: ApiCallDep
) -> schemas.CollectionBody:
    """Create an empty collection of that name, unless it exists."""

    def work(tenant: Tenant, _: Check) -> tuple[bool, schemas.CollectionBody]:
        def check(held: int) -> None:
            tenant.check_quota(call.principal, "collections", held, 1)

        return tenant.collections.folders.create(body.name, check), _info(tenant, body.name)

    created, info = await call.on_tenant(work)
    response.status_code = 201 if created else 200
    return info


@router.get("/{name}", summary="Show a collection")
async def show_collection(name: CollectionName, call: ApiCallDep) -> schemas.CollectionBody:
    """The size of a collection."""
    return await call.on_tenant(lambda tenant, _: _info(tenant, name))


@router.delete("/{name}", summary="Delete a collection")
async def delete_collection(name: CollectionName, call: ApiCallDep) -> schemas.Deleted:
    """Delete its documents, and the KV of every text that no other collection holds."""
    if not await call.on_tenant(lambda tenant, _: tenant.collections.delete(name), deletes=True):
        raise not_found("collection", name, "name")
    return schemas.Deleted(id=name)


@router.post(
    "/{name}/documents", status_code=201, summary="Store documents", openapi_extra=_DOCUMENTS_BODY
)
async def add_documents(name: CollectionName, call: ApiCallDep) -> schemas.IngestResponse:
    """Store documents, as JSON or as files in a form: split, index and encode new ones. Unchanged
    ones cost nothing.
    """
    parsed = await _documents(call)
    return await call.on_tenant(partial(_ingest, call.principal, name, parsed))


@router.get("/{name}/documents", summary="List documents")
async def list_documents(
    name: CollectionName,
    call: ApiCallDep,
    limit: Annotated[int, Query(ge=1, le=1000, description="Documents per page.")] = 100,
    after: Annotated[
        str, Query(pattern=r"^[0-9]{1,18}$", description="`next` of the previous page.")
    ] = "0",
) -> schemas.DocumentList:
    """A page of documents, in the order in which they were stored."""
    return await call.on_collection(
        name, lambda collection, _: _page(collection.index, limit, int(after))
    )


@router.get("/{name}/documents/{document_id:path}", summary="Show a document")
async def show_document(
    name: CollectionName, document_id: DocumentId, call: ApiCallDep
) -> schemas.DocumentOut:
    """A document's text and metadata."""

    def work(collection: Rag, _: Check) -> schemas.DocumentOut:
        index = collection.index
        document = index.contents.document(document_id)
        if document is None:
            raise not_found("document", document_id, "document_id")
        return schemas.DocumentOut(
            id=document_id,
            title=title_of(document),
            source=document.source,
            characters=len(document.text),
            chunks=len(index.contents.passages(document_id)),
            text=document.text,
            metadata=dict(document.metadata),
        )

    return await call.on_collection(name, work)


@router.delete("/{name}/documents/{document_id:path}", summary="Delete a document")
async def delete_document(
    name: CollectionName, document_id: DocumentId, call: ApiCallDep
) -> schemas.Deleted:
    """Delete it, and the KV of every text that no other document holds."""

    def work(tenant: Tenant, check: Check) -> bool:
        with tenant.collections.use(name, check=check) as collection:
            return bool(
                tenant.collections.delete_documents(collection, [document_id], check).deleted
            )

    if not await call.on_tenant(work, deletes=True):
        raise not_found("document", document_id, "document_id")
    return schemas.Deleted(id=document_id)


@router.post("/{name}/search", summary="Search a collection")
async def search(
    name: CollectionName, body: schemas.SearchRequest, call: ApiCallDep
) -> schemas.SearchResponse:
    """The passages that a question would be answered from."""
    check_text(body.query, call.limits, "query")
    check_at_most(body.k, call.limits.documents, "k", "documents")

    def work(collection: Rag, check: Check) -> schemas.SearchResponse:
        hits = collection.index.search(
            body.query, body.k, retriever=body.retriever, where=body.filter, check=check
        )
        return schemas.SearchResponse(hits=sources_of(hits))

    return await call.on_collection(name, work)


async def _documents(call: ApiCall) -> Parsed:
    """The documents of a request's body; of a large one also the passages. Raises `ApiError`."""
    request = call.request
    service = call.service
    kind = request.headers.get("content-type", "")
    size = request.headers.get("content-length", "")
    upload = Upload(kind, call.limits)
    if not kind.lower().startswith(FORM) and size.isdecimal() and int(size[:20]) <= SMALL_BYTES:
        return Parsed(parse_upload(upload, await _body(request)))
    async with service.parser.place(call.principal.tenant):
        large = dataclasses.replace(upload, splitter=call.tenants.splitter)
        body = await _body(request)
        return await call.on_thread(lambda check: service.parser.parse(large, body, check))


async def _body(request: Request) -> bytes:
    """The body. `request.body()` would keep it until the documents are stored."""
    return b"".join([piece async for piece in request.stream()])


def _ingest(
    principal: Principal, name: str, parsed: Parsed, tenant: Tenant, check: Check
) -> schemas.IngestResponse:
    with tenant.collections.use(name, check=check) as collection:
        index = collection.index

        def allow() -> None:
            ids = {document.id for document in parsed.documents}
            folders = tenant.collections.folders
            new = len(ids - index.contents.document_hashes(ids).keys())
            held = sum(one.documents for one in folders.infos())
            tenant.check_quota(principal, "documents", held, new)
            check_disk(folders.size_bytes(), tenant.engine.config.store.disk_bytes)

        report = tenant.collections.ingest(collection, parsed, check, allow)
        encoded = tenant.collections.encode(name, collection, report, check)
    changes = {
        name: list(getattr(report, name)) for name in ("added", "changed", "unchanged", "deleted")
    }
    return schemas.IngestResponse(**changes, chunks=encoded)


def _info(tenant: Tenant, name: str) -> schemas.CollectionBody:
    if (found := tenant.collections.folders.info(name)) is None:
        raise not_found("collection", name, "name")
    return found


def _page(index: Index, limit: int, after: int) -> schemas.DocumentList:
    found = index.contents.document_page(after, limit + 1)
    following = str(found[limit - 1].position) if len(found) > limit else None
    listed = [
        schemas.DocumentInfo(
            id=one.id,
            title=title_of(one),
            source=one.source,
            characters=one.characters,
            chunks=one.passages,
        )
        for one in found[:limit]
    ]
    return schemas.DocumentList(data=listed, next=following)
