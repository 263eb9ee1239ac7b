"""/v1/collections: sets of documents that questions are asked over."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response

from ragkv.retrieval import Document, Index, Where

from .. import schemas
from ..answering import check_count, check_text
from ..collections import Collection, CollectionInfo, Stored
from ..errors import ApiError, not_found, responses
from ..keys import Principal
from ..reports import source_of
from ..schemas import ID_PATTERN, NAME_PATTERN
from ..service import Here, Who
from ..tenants import Tenant
from ..uploads import check_document, document_of, documents_in

router = APIRouter(prefix="/v1/collections", tags=["collections"])

CollectionName = Annotated[str, Path(pattern=NAME_PATTERN, description="The collection's name.")]
DocumentId = Annotated[str, Path(pattern=ID_PATTERN, description="The document's id; it may hold slashes.")]

_DOCUMENTS = schemas.DocumentsIn.model_json_schema()
_DOCUMENTS["properties"]["documents"]["items"] = _DOCUMENTS.pop("$defs")[
    "DocumentIn"
]  # no reference to what is nowhere
_DOCUMENTS_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": _DOCUMENTS},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "files": {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1}
                    },
                    "required": ["files"],
                    "additionalProperties": False,
                }
            },
        },
    }
}


@router.get("", summary="List collections", responses=responses())
async def list_collections(request: Request, service: Here, who: Who) -> schemas.CollectionList:
    """Every collection of the caller's, by name."""

    def work() -> list[CollectionInfo]:
        with service.tenant(who) as tenant:
            return tenant.collections.list()

    infos = await service.house.run(request, lambda _: work())
    return schemas.CollectionList(data=[_collection(info) for info in infos])


@router.post(
    "",
    status_code=201,
    summary="Make a collection",
    responses={**responses(), 200: {"description": "It was there", "model": schemas.Collection}},
)
async def create_collection(
    body: schemas.CollectionIn, request: Request, response: Response, service: Here, who: Who
) -> schemas.Collection:
    """An empty collection of that name, or the one there is."""

    def work() -> tuple[bool, CollectionInfo]:
        with service.tenant(who) as tenant:
            made = tenant.collections.create(body.name)
            with tenant.collections.lease(body.name) as collection:
                return made, _there(collection, body.name).info

    made, info = await service.house.run(request, lambda _: work())
    response.status_code = 201 if made else 200
    return _collection(info)


@router.get("/{name}", summary="Show a collection", responses=responses(404))
async def show_collection(name: CollectionName, request: Request, service: Here, who: Who) -> schemas.Collection:
    """How much it holds."""

    def work() -> CollectionInfo:
        with service.tenant(who) as tenant, tenant.collections.lease(name) as collection:
            return _there(collection, name).info

    return _collection(await service.house.run(request, lambda _: work()))


@router.delete("/{name}", summary="Delete a collection", responses=responses(404))
async def delete_collection(name: CollectionName, request: Request, service: Here, who: Who) -> schemas.Deleted:
    """Its documents are gone, and the KV of every text that no other collection has."""

    def work() -> bool:
        with service.tenant(who) as tenant:
            deleted = tenant.collections.delete(name)
            tenant.forget_unnamed()
            return deleted

    if not await service.house.run(request, lambda _: work()):
        raise not_found("collection", name, "name")
    return schemas.Deleted(id=name)


@router.post(
    "/{name}/documents",
    status_code=201,
    summary="Store documents",
    responses=responses(404),
    openapi_extra=_DOCUMENTS_BODY,
)
async def add_documents(name: CollectionName, request: Request, service: Here, who: Who) -> schemas.IngestResponse:
    """Documents as JSON, or as files in a form. New ones are split, indexed, encoded; unchanged ones cost nothing."""
    documents = await documents_in(request, service.config.limits)

    def work() -> Stored:
        with service.tenant(who) as tenant:
            return _ingested(tenant, who, name, documents)

    return _stored(await service.house.run(request, lambda _: work()))


@router.get("/{name}/documents", summary="List documents", responses=responses(404))
async def list_documents(
    name: CollectionName,
    request: Request,
    service: Here,
    who: Who,
    limit: Annotated[int, Query(ge=1, le=1000, description="Documents in this page.")] = 100,
    after: Annotated[str | None, Query(min_length=1, description="`next` of the page before.")] = None,
) -> schemas.DocumentList:
    """A page of documents, in the order they came."""

    def work() -> schemas.DocumentList:
        with service.tenant(who) as tenant, tenant.collections.lease(name) as collection:
            return _page(_there(collection, name).rag.index, limit, after)

    return await service.house.run(request, lambda _: work())


@router.get("/{name}/documents/{document_id:path}", summary="Show a document", responses=responses(404))
async def show_document(
    name: CollectionName, document_id: DocumentId, request: Request, service: Here, who: Who
) -> schemas.DocumentOut:
    """Its text and metadata."""

    def work() -> schemas.DocumentOut:
        with service.tenant(who) as tenant, tenant.collections.lease(name) as collection:
            index = _there(collection, name).rag.index
            document = index.document(document_id)
            if document is None:
                raise not_found("document", document_id, "document_id")
            info = _document(index, document)
            return schemas.DocumentOut(**info.model_dump(), text=document.text, metadata=dict(document.metadata))

    return await service.house.run(request, lambda _: work())


@router.put("/{name}/documents/{document_id:path}", summary="Store one document", responses=responses(404))
async def put_document(
    name: CollectionName,
    document_id: DocumentId,
    body: schemas.DocumentPut,
    request: Request,
    service: Here,
    who: Who,
) -> schemas.IngestResponse:
    """A document of that id, new or in place of the one there is."""
    document = document_of(body, document_id)
    check_document(document, service.config.limits)

    def work() -> Stored:
        with service.tenant(who) as tenant:
            return _ingested(tenant, who, name, [document])

    return _stored(await service.house.run(request, lambda _: work()))


@router.delete("/{name}/documents/{document_id:path}", summary="Delete a document", responses=responses(404))
async def delete_document(
    name: CollectionName, document_id: DocumentId, request: Request, service: Here, who: Who
) -> schemas.Deleted:
    """It is gone, and so is the KV of every text that no other document has."""

    def work() -> bool:
        with service.tenant(who) as tenant, tenant.collections.lease(name) as collection:
            removal = tenant.collections.remove(_there(collection, name), [document_id])
            if removal.deleted:
                tenant.forget_unnamed()
            return bool(removal.deleted)

    if not await service.house.run(request, lambda _: work()):
        raise not_found("document", document_id, "document_id")
    return schemas.Deleted(id=document_id)


@router.post("/{name}/search", summary="Search a collection", responses=responses(404))
async def search(
    name: CollectionName, body: schemas.SearchRequest, request: Request, service: Here, who: Who
) -> schemas.SearchResponse:
    """The passages that a question would be answered from."""
    check_text(body.query, service.config.limits, "query")
    check_count(body.k, service.config.limits, "k")

    def work() -> schemas.SearchResponse:
        where: Where | None = body.filter
        with service.tenant(who) as tenant, tenant.collections.lease(name) as collection:
            rag = _there(collection, name).rag
            hits = rag.retrieve(body.query, body.k, retriever=body.retriever, where=where)
            return schemas.SearchResponse(hits=[source_of(number, hit) for number, hit in enumerate(hits, 1)])

    return await service.house.run(request, lambda _: work())


def _ingested(tenant: Tenant, who: Principal, name: str, documents: list[Document]) -> Stored:
    with tenant.collections.lease(name) as found:
        collection = _there(found, name)
        index = collection.rag.index

        def new() -> int:
            return len({one.id for one in documents if index.document(one.id) is None})

        with tenant.quotas.documents(who, tenant.collections.documents, new):
            stored = tenant.collections.ingest(collection, documents)
        if stored.index.forgotten_passages:
            tenant.forget_unnamed()
        return stored


def _page(index: Index, limit: int, after: str | None) -> schemas.DocumentList:
    ids = index.document_ids()
    if after is not None and after not in ids:
        raise ApiError(
            400, f"after is {after[:80]!r}, which is no document here: begin again without it.", param="after"
        )
    begin = 0 if after is None else ids.index(after) + 1
    page = ids[begin : begin + limit]
    documents = [document for document in map(index.document, page) if document is not None]
    following = page[-1] if begin + limit < len(ids) else None
    return schemas.DocumentList(data=[_document(index, one) for one in documents], next=following)


def _document(index: Index, document: Document) -> schemas.DocumentInfo:
    title = document.metadata.get("title")
    return schemas.DocumentInfo(
        id=document.id,
        title=title if isinstance(title, str) else None,
        source=document.source,
        characters=len(document.text),
        chunks=len(index.passages(document.id)),
    )


def _collection(info: CollectionInfo) -> schemas.Collection:
    return schemas.Collection(name=info.name, documents=info.documents, chunks=info.chunks, created=info.created)


def _stored(done: Stored) -> schemas.IngestResponse:
    index, kv = done.index, done.kv
    return schemas.IngestResponse(
        added=list(index.added),
        changed=list(index.changed),
        unchanged=list(index.unchanged),
        deleted=list(index.deleted),
        chunks=schemas.ChunksDone(encoded=kv.encoded, present=kv.present, failed=kv.failed),
    )


def _there(collection: Collection | None, name: str) -> Collection:
    if collection is None:
        raise not_found("collection", name, "name")
    return collection


__all__ = ["router"]
